"""Cuts lines of charts into pieces: they break at values that are not finite, and end at the edges of a chart."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from .labels import format_long

MAX_POINTS: Final = 500
_MOST_NAMED: Final = 6  # gaps of a line

XY = tuple[float, float]


def is_finite(point: XY) -> bool:
    """Return whether a point has a place in a chart; else its line has a gap there.

    Args:
        point: x and y.
    """
    return math.isfinite(point[1])


def downsample(points: Sequence[XY], limit: int = MAX_POINTS) -> list[XY]:
    """Reduce a series to at most `limit` points, and keep its extremes and its gaps.

    Args:
        points: pairs of x and y, in the order of x.
        limit: largest number of points to return.

    Returns:
        The first and the last point, and of each stretch between them the smallest and the largest one and the first
        that is not finite.
    """
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    finite = list(map(is_finite, inner))
    changes = sum(map(operator.ne, finite, finite[1:]))  # so many stretches at most have points of both kinds
    stretches = max((limit - 2) // 3, (limit - 2 - changes) // 2)
    kept = [points[0]]
    for number in range(stretches):
        stretch = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        kept += _choose_kept(stretch)
    kept.append(points[-1])
    return kept


def _choose_kept(stretch: Sequence[XY]) -> list[XY]:
    drawn = [place for place, point in enumerate(stretch) if is_finite(point)]
    chosen = {choose(drawn, key=lambda place: stretch[place][1]) for choose in (min, max) if drawn}
    if len(drawn) < len(stretch):
        chosen.add(next(place for place, point in enumerate(stretch) if not is_finite(point)))
    return [stretch[place] for place in sorted(chosen)]


def cut(pairs: Sequence[XY], low: float, high: float) -> Iterator[list[XY]]:
    """Yield the pieces of a line that lie between two values of y. A piece between two gaps may be one point.

    Args:
        pairs: the points of the line.
        low: smallest value of y.
        high: largest one.
    """
    for are_finite, group in itertools.groupby(pairs, key=is_finite):
        piece = list(group)
        if are_finite and len(piece) > 1:
            yield from _cut_piece(piece, low, high)
        elif are_finite and low <= piece[0][1] <= high:
            yield piece


def _cut_piece(pairs: Sequence[XY], low: float, high: float) -> Iterator[list[XY]]:
    piece: list[XY] = []
    for start, end in itertools.pairwise(pairs):
        first, last = _cut_segment(start, end, low, high)
        if first is None or last is None:
            continue
        if piece and piece[-1] != first:
            yield piece
            piece = []
        piece += [last] if piece else [first, last]
    if piece:
        yield piece


def _cut_segment(start: XY, end: XY, low: float, high: float) -> tuple[XY | None, XY | None]:
    (x0, y0), (x1, y1) = start, end
    if max(y0, y1) < low or min(y0, y1) > high:
        return None, None

    def move(x: float, y: float) -> XY:
        if low <= y <= high:
            return x, y
        edge = low if y < low else high
        return x0 + (x1 - x0) * ((edge - y0) / (y1 - y0)), edge

    return move(x0, y0), move(x1, y1)


@dataclass(frozen=True)
class Gap:
    """A part of a line whose values are not finite.

    Attributes:
        start: x of the first one.
        end: x of the last one.
        values: what they are: `nan`, `inf` or `-inf`, each once.
    """

    start: float
    end: float
    values: Sequence[str]


def find_gaps(pairs: Sequence[XY]) -> list[Gap]:
    """Return the gaps of a line, in the order of x.

    Args:
        pairs: the points of the line. Where x goes back, another gap begins.
    """
    runs: list[list[XY]] = []
    previous: XY | None = None
    for point in pairs:
        if not is_finite(point):
            if previous is None or is_finite(previous) or point[0] < previous[0]:
                runs.append([])
            runs[-1].append(point)
        previous = point
    gaps = [Gap(run[0][0], run[-1][0], list(dict.fromkeys(f"{y:g}" for _, y in run))) for run in runs]
    return sorted(gaps, key=lambda gap: gap.start)


def describe_gaps(gaps: Sequence[Gap], axis: str) -> str:
    """Return what a line is where it has gaps, such as `nan at step 10 to 12, 20`.

    Args:
        gaps: at least one.
        axis: name of the x axis.
    """
    values = dict.fromkeys(value for gap in gaps for value in gap.values)
    places = [
        format_long(gap.start)
        if gap.start == gap.end
        else f"{format_long(gap.start)} to {format_long(gap.end)}"
        for gap in gaps[:_MOST_NAMED]
    ]
    more = f" and {len(gaps) - _MOST_NAMED} more" if len(gaps) > _MOST_NAMED else ""
    return f"{' or '.join(values)} at {axis} {', '.join(places)}{more}"
