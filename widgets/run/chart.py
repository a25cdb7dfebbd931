"""Renders metrics as SVG: a small chart for each, with axes of its own, of one run or of several."""

from __future__ import annotations

import bisect
import html
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from notebook_accel.stream.series import Point

from .ansi import make_readable
from .labels import format_long, format_short, measure
from .pieces import MAX_POINTS, XY, Gap, cut, describe_gaps, downsample, find_gaps, is_finite
from .scale import Scale, find_limits

MAX_SERIES: Final = 12
WIDTH: Final = 640
_GAP: Final = 16  # between two charts
_HEIGHT: Final = 152
_HEIGHT_ALONE: Final = 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 8, 24, 32
_LABEL: Final = 62  # pixels of one below the x axis
_LETTERS: Final = 6.5  # pixels of one, on the average
_LEAST: Final = 6  # letters of a name that tell it from others
_SHORTEST: Final = 4  # letters of a title that leaves room for others
_BESIDE: Final = 4  # letters that the colour of a line and blanks take
_COLOUR: Final = 1.7  # without blanks
_BOLD: Final = 0.9  # as many letters of a title have room
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
_MAX_STOPS: Final = 240  # of the pointer, in all charts
_THICK: Final = 4  # pixels of a dot, and of a mark where a line is not finite
_FONT: Final = "font-family:system-ui,sans-serif;font-size:11px"
_SPLITS: Final = re.compile(
    r"^(train|training|eval|evaluation|val|valid|validation|test)[_/](?=.)|(?<=.)[_/](train|eval|val|valid|test)$"
)
"""What a metric's name says of the part of the data that it was measured on."""


@dataclass(frozen=True)
class Panel:
    """One small chart: a metric, or the same one of several parts of the data, such as `loss` and `eval_loss`.

    Where runs are compared it is one metric of each of them.

    Attributes:
        axis: name of the x axis.
        series: the points of each metric or run, at least two, in the order of x. Others besides are not finite: gaps.
        last: the last value of each.
        colours: that of each.
        gaps: where the values of each are not finite; none of most.
        title: what stands before them; empty for nothing.
    """

    axis: str
    series: Mapping[str, list[XY]]
    gaps: Mapping[str, Sequence[Gap]]
    last: Mapping[str, float]
    colours: Mapping[str, str]
    title: str = ""


def make_panels(metrics: Mapping[str, Sequence[Point]], started: float, *, log: bool = False) -> list[Panel]:
    """Return what there is to draw.

    Args:
        metrics: the points of each metric, oldest first.
        started: when the run was launched, in seconds since the epoch.
        log: whether only values above 0 can be drawn.

    Returns:
        A panel for each metric that has values at two places or more, for the first `MAX_SERIES` of these. The x axis
        is `step` if every point of a panel has one, else `seconds` since the launch.
    """
    together: dict[str, dict[str, list[Point]]] = {}
    colours: dict[str, str] = {}
    for name, points in metrics.items():
        if not (drawn := _choose_drawn(points, log)):
            continue
        together.setdefault(_SPLITS.sub("", name, count=1), {})[name] = drawn
        colours[name] = choose_colour(len(colours))
        if len(colours) == MAX_SERIES:
            break
    return [
        Panel(
            *_place_points(group, dict.fromkeys(group, started)),
            {name: metrics[name][-1].value for name in group},
            colours,
        )
        for group in together.values()
    ]


@dataclass(frozen=True)
class Compared:
    """A run that is drawn together with others.

    Attributes:
        metrics: its points of each metric, oldest first.
        started: when it was launched, in seconds since the epoch.
        colour: of its lines; empty for that of its place.
    """

    metrics: Mapping[str, Sequence[Point]]
    started: float
    colour: str = ""


def choose_colour(number: int) -> str:
    """Return one of `COLOURS`, which repeat.

    Args:
        number: from 0.
    """
    return COLOURS[number % len(COLOURS)]


def compare_panels(
    runs: Mapping[str, Compared], *, log: bool = False, limit: int = MAX_POINTS
) -> list[Panel]:
    """Return what there is to draw of several runs: a panel for each metric, with a line for each run.

    Args:
        runs: by the words that name them. Each has the same colour in all panels.
        log: see `make_panels`.
        limit: how many points of a line are drawn.

    Returns:
        Panels of the first `MAX_SERIES` metrics that a run has at two places or more. The x axis is `step` if every
        point of a panel has one, else `seconds` since the launch of its run.
    """
    colours = {name: run.colour or choose_colour(number) for number, (name, run) in enumerate(runs.items())}
    panels = []
    for metric in dict.fromkeys(metric for run in runs.values() for metric in run.metrics):
        chosen = {name: _choose_drawn(run.metrics.get(metric, ()), log) for name, run in runs.items()}
        group = {name: points for name, points in chosen.items() if points}
        if group:
            axis, series, gaps = _place_points(group, {name: runs[name].started for name in group}, limit)
            last = {name: runs[name].metrics[metric][-1].value for name in group}
            panels.append(Panel(axis, series, gaps, last, colours, metric))
        if len(panels) == MAX_SERIES:
            break
    return panels


def _choose_drawn(points: Sequence[Point], log: bool) -> list[Point]:
    """Return the points that a chart can show, and those that are its gaps; none where they are no line."""
    chosen = [
        point
        for point in points
        if not math.isfinite(point.value) or (abs(point.value) <= _LARGEST and (point.value > 0 or not log))
    ]
    return chosen if _has_length([point for point in chosen if math.isfinite(point.value)]) else []


def _has_length(points: Sequence[Point]) -> bool:
    steps = {point.step for point in points}
    return len(steps) > 1 or (None in steps and len({point.time for point in points}) > 1)


def _place_points(
    group: Mapping[str, list[Point]], started: Mapping[str, float], limit: int = MAX_POINTS
) -> tuple[str, dict[str, list[XY]], dict[str, list[Gap]]]:
    """Return the name of the x axis, and each line's points on it and its gaps."""
    stepped = all(
        point.step is not None and abs(point.step) <= _LARGEST
        for points in group.values()
        for point in points
    )
    whole = {
        name: [
            (
                float(point.step) if stepped and point.step is not None else point.time - started[name],
                point.value,
            )
            for point in points
        ]
        for name, points in group.items()
    }
    series = {name: downsample(pairs, limit) for name, pairs in whole.items()}
    gaps = {name: found for name, pairs in whole.items() if (found := find_gaps(pairs))}
    return "step" if stepped else "seconds", series, gaps


def render_svg(panels: Sequence[Panel], words: str, *, log: bool = False) -> str:
    """Return the charts as one SVG element, two beside each other.

    Args:
        panels: what to draw.
        words: what the charts show, for who does not see them.
        log: whether the y axes are logarithmic.

    Returns:
        The SVG; empty if there is nothing to draw.
    """
    if not panels:
        return ""
    words += ", logarithmic" if log else ""
    places = list(_place(len(panels)))
    height = places[-1][1] + places[-1][3]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{html.escape(words)}" '
        f'style="max-width:100%;height:auto;color:var(--jp-ui-font-color1,currentColor);{_FONT}">'
    ]
    for panel, (left, top, width, tall) in zip(panels, places, strict=True):
        drawn = "".join(_render_panel(panel, width, tall, log, _MAX_STOPS // len(panels)))
        parts.append(f'<g transform="translate({left} {top})">{drawn}</g>')
    parts.append("</svg>")
    return "".join(parts)


def render_areas(panels: Sequence[Panel]) -> str:
    """Return the areas of an image map, as HTML: an image of the charts has the values under the pointer, too.

    Args:
        panels: what the image shows.
    """
    parts = []
    for panel, (left, top, width, tall) in zip(panels, _place(len(panels)), strict=True):
        for start, end, words in _list_stops(panel, width, _MAX_STOPS // len(panels)):
            coords = f"{left + start:.0f},{top + _TOP},{left + end:.0f},{top + tall - _BOTTOM}"
            parts.append(f'<area shape="rect" coords="{coords}" title="{html.escape(words)}">')
    return "".join(parts)


def _place(count: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield left and upper edge, width and height of each of so many charts, in pixels."""
    if count == 1:
        yield 0, 0, WIDTH, _HEIGHT_ALONE
        return
    width = (WIDTH - _GAP) // 2
    for number in range(count):
        yield number % 2 * (width + _GAP), number // 2 * _HEIGHT, width, _HEIGHT


def render_values(metrics: Mapping[str, Sequence[Point]], panels: Sequence[Panel]) -> str:
    """Return the last values of the metrics that are not drawn, as HTML; empty without one.

    Args:
        metrics: the points of each metric, oldest first.
        panels: what is drawn.
    """
    drawn = {name for panel in panels for name in (*panel.series, panel.title)}
    rest = {name: points for name, points in metrics.items() if name not in drawn}
    shown = {
        name: format_short(points[-1].value) for name, points in itertools.islice(rest.items(), MAX_SERIES)
    }
    entries = [
        f'<span style="margin-right:1.2em;white-space:nowrap">{html.escape(name)} <b>{value}</b></span>'
        for name, value in shown.items()
    ]
    if len(rest) > MAX_SERIES:
        entries.append(f"<span>and {len(rest) - MAX_SERIES} more in <code>run.metrics</code></span>")
    return f'<div style="line-height:1.6">{" ".join(entries)}</div>' if entries else ""


def describe_last_values(metrics: Mapping[str, Sequence[Point]]) -> str:
    """Return the last step and the last value of each metric, such as `step 9: loss 0.12, accuracy 0.9`.

    Args:
        metrics: the points of each metric, oldest first.
    """
    words = [
        f"{name} {format_short(points[-1].value)}" for name, points in list(metrics.items())[:MAX_SERIES]
    ]
    steps = [points[-1].step for points in metrics.values() if points[-1].step is not None]
    return (f"step {max(steps)}: " if steps else "") + ", ".join(words)


# -- one chart


def _render_panel(panel: Panel, width: int, height: int, log: bool, stops: int) -> Iterator[str]:
    """Yield the parts of a chart whose upper left corner is at 0, 0."""
    ys = [[y for _, y in filter(is_finite, pairs)] for pairs in panel.series.values()]
    limits = [(min(values), max(values)) if log else find_limits(values) for values in ys]
    low, high = min(low for low, _ in limits), max(high for _, high in limits)
    across = _scale_across(panel, width)
    up = Scale(low, high, height - _BOTTOM, _TOP, log=log)
    grid, notes = _render_grid(across, up, width, height, panel.axis)
    yield grid
    for name, pairs in panel.series.items():
        pieces = [[(across(x), up(y)) for x, y in piece] for piece in cut(pairs, low, high)]
        yield from _render_line(panel.colours[name], pieces)
    if words := _describe_hidden(ys, low, high):
        notes.append(words)
    if notes:
        yield f'<text x="{_LEFT}" y="{height - 4}" fill="currentColor">{", ".join(notes)}</text>'
    yield _render_title(panel, width)
    for left, right, words in _list_stops(panel, width, stops):
        yield (
            f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{height - _TOP - _BOTTOM}" '
            f'fill="transparent"><title>{html.escape(words)}</title></rect>'
        )
    for name, gaps in panel.gaps.items():  # above the areas, which would hide their words
        words = f"{name} {describe_gaps(gaps, panel.axis)}"
        yield _render_gaps(panel.colours[name], gaps, words, across, height - _BOTTOM)


def _describe_hidden(ys: Sequence[Sequence[float]], low: float, high: float) -> str:
    """Return what the first values were, where they lie outside of the chart; empty where all are in it."""
    begins = [values[0] for values in ys if not low <= values[0] <= high]
    if begins:
        return f"began at {' to '.join(dict.fromkeys(map(format_short, (min(begins), max(begins)))))}"
    others = [value for values in ys for value in values if not low <= value <= high]
    if not others:
        return ""
    return f"reached {format_short(max(others, key=lambda value: max(low - value, value - high)))} at first"


def _render_title(panel: Panel, width: int) -> str:
    """Return what stands above a chart. Where its lines are many or the title is long, both are shortened."""
    letters = int((width - _LEFT) / _LETTERS)
    values = {name: format_short(panel.last[name]) for name in panel.series}
    names = sum(min(len(name), _LEAST) for name in panel.series)  # what has to be there of them
    long = letters - math.ceil(names + sum(len(value) + _BESIDE for value in values.values()))
    short = letters - math.ceil(names + _COLOUR * len(values))
    has_values = long >= min(len(panel.title), 2 * _LEAST)
    left = long if has_values else short
    if left < min(len(panel.title), _SHORTEST):  # the table names them
        return f'<text x="{_LEFT}" y="14" fill="currentColor">{_make_bold(_shorten(panel.title, letters // 2))}</text>'
    title = _shorten(panel.title, max(_SHORTEST, int(left * _BOLD)))
    more = (left - len(title)) // len(values)
    words = [_make_bold(title)] if title else []
    for name, value in values.items():
        colour = f'<tspan fill="{panel.colours[name]}">━</tspan>'
        shown = html.escape(_shorten(name, min(len(name), _LEAST) + more))
        words.append(f"{colour} {shown} {_make_bold(value)}" if has_values else f"{colour}{shown}")
    return f'<text x="{_LEFT}" y="14" fill="currentColor">{"  ".join(words)}</text>'


def _make_bold(text: str) -> str:
    return f'<tspan font-weight="600">{html.escape(text)}</tspan>'


def _shorten(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _render_grid(across: Scale, up: Scale, width: int, height: int, axis: str) -> tuple[str, list[str]]:
    """Return the axes with their labels, and what has to be said of them below the chart."""
    bottom, right = height - _BOTTOM, width - _RIGHT
    rows = up.ticks(max(4, (bottom - _TOP) // 30), _LEFT - 8)
    columns = across.ticks(max(5, (right - _LEFT) // 80), _LABEL)
    parts = [
        f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15" fill="none"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{label}</text>'
        for y, label in rows.labels
    ]
    for x, label in columns.labels:
        middle = min(x, width - measure(label) / 2)
        parts.append(
            f'<path d="M{x:.1f} {bottom}v4" stroke="currentColor" fill="none"/>'
            f'<text x="{middle:.1f}" y="{bottom + 16}" text-anchor="middle" fill="currentColor">{label}</text>'
        )
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="currentColor" fill="none"/>')
    name = f"{axis} from {columns.start}" if columns.start else axis
    parts.append(f'<text x="{right}" y="{height - 4}" text-anchor="end" fill="currentColor">{name}</text>')
    return "".join(parts), [f"from {rows.start}"] if rows.start else []


def _render_line(colour: str, pieces: Sequence[Sequence[XY]]) -> Iterator[str]:
    """Yield the pieces of a line in one path, and those that are one point as dots."""
    if lines := "".join(_draw(piece) for piece in pieces if len(piece) > 1):
        yield f'<path d="{lines}" stroke="{colour}" stroke-width="1.8" fill="none"/>'
    if dots := "".join(_draw([*piece, *piece]) for piece in pieces if len(piece) == 1):
        yield f'<path d="{dots}" stroke="{colour}" stroke-width="{_THICK}" stroke-linecap="round" fill="none"/>'


def _draw(places: Sequence[XY]) -> str:
    return "M" + "L".join([f"{x:.1f} {y:.1f}" for x, y in places])


def _render_gaps(colour: str, gaps: Sequence[Gap], words: str, across: Scale, bottom: int) -> str:
    """Return marks on the x axis where a line is not finite. Those that would touch are one."""
    marks: list[tuple[float, float]] = []
    for gap in gaps:
        start, end = across(gap.start) - _THICK / 2, across(gap.end) + _THICK / 2
        if marks and start <= marks[-1][1]:
            start, end = marks[-1][0], max(end, marks.pop()[1])
        marks.append((start, end))
    path = "".join(_draw([(start, bottom), (end, bottom)]) for start, end in marks)
    return (
        f'<path d="{path}" stroke="{colour}" stroke-width="{_THICK}" fill="none">'
        f"<title>{html.escape(words)}</title></path>"
    )


Stop = tuple[float, float, str]
"""Left and right edge of an area of a chart, in pixels, and what is said under the pointer there."""


def _list_stops(panel: Panel, width: int, most: int) -> Iterator[Stop]:
    xs = sorted({x for pairs in panel.series.values() for x, _ in pairs})
    across = _scale_across(panel, width)
    chosen = _choose_stops(panel, xs, most) if len(xs) > most else xs
    places = [across(x) for x in chosen]
    edges = [float(_LEFT), *((left + right) / 2 for left, right in itertools.pairwise(places)), float(width)]
    ordered = {name: sorted(pairs) for name, pairs in panel.series.items()}  # a run may begin again
    for x, (left, right) in zip(chosen, itertools.pairwise(edges), strict=True):
        words = "".join(f"\n{name} {format_long(_nearest(pairs, x))}" for name, pairs in ordered.items())
        yield left, right, f"{panel.axis} {format_long(x)}{words}"


def _choose_stops(panel: Panel, xs: Sequence[float], most: int) -> list[float]:
    """Return so many values of x, evenly spread; of those nearby the first where a line is not finite."""
    odd = {point[0] for pairs in panel.series.values() for point in pairs if not is_finite(point)}
    places = [number * (len(xs) - 1) // (most - 1) for number in range(most)]
    parts = [xs[start:end] for start, end in itertools.pairwise([*places, len(xs)])]
    return [next((x for x in part if x in odd), part[0]) for part in parts]


def _scale_across(panel: Panel, width: int) -> Scale:
    xs = [x for pairs in panel.series.values() for x, _ in pairs]
    return Scale(min(xs), max(xs), _LEFT, width - _RIGHT)


def _nearest(pairs: Sequence[XY], x: float) -> float:
    place = bisect.bisect_left(pairs, x, key=lambda pair: pair[0])
    around = pairs[max(0, place - 1) : place + 1]
    return min(around, key=lambda pair: abs(pair[0] - x))[1]
