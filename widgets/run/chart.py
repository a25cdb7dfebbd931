"""Renders the metrics of a run as an SVG chart."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Final

from notebook_accel.stream.series import Point

from .ansi import make_readable

MAX_POINTS: Final = 500
MAX_SERIES: Final = 12
WIDTH: Final = 640
HEIGHT: Final = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 40
_HUES: Final = (
    (31, 119, 220),
    (220, 90, 20),
    (30, 150, 70),
    (200, 40, 60),
    (140, 90, 210),
    (140, 100, 60),
    (210, 80, 170),
    (20, 150, 160),
)
COLOURS: Final = tuple(make_readable(hue) for hue in _HUES)
_LARGEST: Final = 1e300  # values beyond it are not drawn: their differences may be infinite
_SMALLEST: Final = 1e-300  # between two ticks
_SMALLEST_POWER: Final = -323  # of 10 that is not 0
_DASHES: Final = ("", "6 3")
_FONT: Final = "font-family:system-ui,sans-serif;font-size:11px"

XY = tuple[float, float]


def downsample(points: Sequence[XY], limit: int = MAX_POINTS) -> list[XY]:
    """Reduce a series to at most `limit` points, and keep its extremes.

    Args:
        points: pairs of x and y, in the order of x.
        limit: largest number of points to return.

    Returns:
        The first and the last point, and the smallest and the largest one of each stretch between them.
    """
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    stretches = (limit - 2) // 2
    kept = [points[0]]
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        low, high = min(stretch, key=_get_y), max(stretch, key=_get_y)
        kept += [low, high] if low[0] <= high[0] else [high, low]
    kept.append(points[-1])
    return kept


def _get_y(point: XY) -> float:
    return point[1]


def make_series(metrics: Mapping[str, Sequence[Point]], started: float) -> tuple[str, dict[str, list[XY]]]:
    """Return the x axis and the points of the series to draw.

    Args:
        metrics: the points of each metric, oldest first.
        started: when the run was launched, in seconds since the epoch.

    Returns:
        The name of the x axis: `step` if every point has a step, else `seconds` since the launch. Then the finite
        points of the first `MAX_SERIES` metrics by name, at most `MAX_POINTS` for each.
    """
    first = dict(list(metrics.items())[:MAX_SERIES])
    stepped = all(
        point.step is not None and abs(point.step) <= _LARGEST
        for points in first.values()
        for point in points
    )
    found: dict[str, list[XY]] = {}
    for name, points in first.items():
        pairs = [
            (float(point.step) if stepped and point.step is not None else point.time - started, point.value)
            for point in points
            if abs(point.value) <= _LARGEST
        ]
        found[name] = downsample(pairs)
    return ("step" if stepped else "seconds"), found


def render_svg(metrics: Mapping[str, Sequence[Point]], started: float, *, log: bool = False) -> str:
    """Return the chart as an SVG element, with a line for each metric, axes and a grid.

    Args:
        metrics: the points of each metric, oldest first.
        started: when the run was launched, in seconds since the epoch.
        log: whether the y axis is logarithmic. Then only values above 0 are drawn.

    Returns:
        The SVG; empty if there is no point to draw.
    """
    axis, series = make_series(metrics, started)
    if log:
        series = {name: [pair for pair in pairs if pair[1] > 0] for name, pairs in series.items()}
    everything = [pair for pairs in series.values() for pair in pairs]
    if not everything:
        return ""
    across = _Scale([x for x, _ in everything], _LEFT, WIDTH - _RIGHT)
    up = _Scale([y for _, y in everything], HEIGHT - _BOTTOM, _TOP, log=log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{html.escape(describe_last_values(metrics))}" '
        f'style="max-width:100%;height:auto;color:var(--jp-ui-font-color1,currentColor);{_FONT}">'
    ]
    parts += _render_grid(across, up)
    parts.append(
        f'<text x="{(_LEFT + WIDTH - _RIGHT) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle" '
        f'fill="currentColor">{axis}</text>'
    )
    for number, pairs in enumerate(series.values()):
        parts.append(_render_line(number, [(across(x), up(y)) for x, y in pairs]))
    parts.append("</svg>")
    return "".join(parts)


def render_legend(metrics: Mapping[str, Sequence[Point]]) -> str:
    """Return the legend as HTML: the names of the series with their colours and last values.

    Args:
        metrics: the points of each metric, oldest first.
    """
    entries = []
    for number, (name, points) in enumerate(list(metrics.items())[:MAX_SERIES]):
        dash = "dashed" if _dash(number) else "solid"
        entries.append(
            '<span style="margin-right:1.2em;white-space:nowrap">'
            f'<span style="display:inline-block;width:1.6em;margin-right:0.4em;vertical-align:middle;'
            f'border-top:3px {dash} {_colour(number)}"></span>'
            f"{html.escape(name)} <b>{points[-1].value:.4g}</b></span>"
        )
    if len(metrics) > MAX_SERIES:
        entries.append(f"<span>and {len(metrics) - MAX_SERIES} more in <code>run.metrics</code></span>")
    return f'<div style="line-height:1.6">{"".join(entries)}</div>' if entries else ""


def describe_last_values(metrics: Mapping[str, Sequence[Point]]) -> str:
    """Return the last step and the last value of each metric, such as `step 9: loss 0.12, accuracy 0.9`.

    Args:
        metrics: the points of each metric, oldest first.
    """
    words = [f"{name} {points[-1].value:.4g}" for name, points in list(metrics.items())[:MAX_SERIES]]
    steps = [points[-1].step for points in metrics.values() if points[-1].step is not None]
    return (f"step {max(steps)}: " if steps else "") + ", ".join(words)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _dash(number: int) -> str:
    return _DASHES[number // len(COLOURS) % len(_DASHES)]


class _Scale:
    """Maps values to positions between two ends of an axis, in pixels.

    Args:
        values: what the axis has to cover.
        start: position of the smallest value.
        end: position of the largest value.
        log: whether the axis is logarithmic.
    """

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool = False) -> None:
        self._start, self._end, self._log = start, end, log
        low, high = min(values), max(values)
        if log:
            low, high = math.log10(low), math.log10(high)
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
            room = 1.0 if log else abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        share = ((math.log10(value) if self._log else value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of four to nine round numbers."""
        if self._log and self._high - self._low >= 1:
            first, last = max(math.ceil(self._low), _SMALLEST_POWER), math.floor(self._high)
            every = max(1, (last - first) // 6)
            return [(self(10.0**power), f"{10.0**power:.4g}") for power in range(first, last + 1, every)]
        low, high = (10**self._low, 10**self._high) if self._log else (self._low, self._high)
        rough = (high - low) / 5
        if rough < _SMALLEST:
            return []  # no round numbers lie between
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        values = [number * step for number in range(first, first + 10) if number * step <= high + step * 1e-9]
        return [(self(value), f"{value:.6g}") for value in values if not self._log or value > 0]


def _render_grid(across: _Scale, up: _Scale) -> list[str]:
    parts = []
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for y, label in up.ticks():
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15" fill="none"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{label}</text>'
        )
    for x, label in across.ticks():
        parts.append(
            f'<path d="M{x:.1f} {bottom}v4" stroke="currentColor" fill="none"/>'
            f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="currentColor">{label}</text>'
        )
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="currentColor" fill="none"/>')
    return parts


def _render_line(number: int, places: Sequence[XY]) -> str:
    if not places:
        return ""
    colour, dash = _colour(number), _dash(number)
    if len(places) == 1:
        return f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3" fill="{colour}"/>'
    path = "M" + "L".join([f"{x:.1f} {y:.1f}" for x, y in places])
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" stroke="{colour}" stroke-width="1.8" fill="none"{dashed}/>'
