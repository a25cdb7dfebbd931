"""Axes: which values they reach, where a value lies on them, and their round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .labels import format_ticks

_SMALLEST: Final = 1e-300  # between two ticks
_SMALLEST_POWER: Final = -323  # of 10 that is not 0
_FLAT: Final = 0.1  # of the height: a later half that uses less is flat
_DEEP: Final = (
    0.002  # of the height: where the later half is nearer to 0, the first values are of another kind
)
_EARLY, _FEW = 1 / 3, 0.02  # of the points may be left out: where the rest is that near to 0, and elsewhere
_LEAST: Final = 8  # points of a line that has early ones


def find_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value that an axis has to reach.

    Args:
        values: of one line, in the order of x; at least one.

    Returns:
        The limits of all values. Those without the first ones, where these would make a flat line of the rest, as a
        loss does that begins at 250 and lives at 0.02. Then so many are left out that the later half has a tenth of the
        height. A curve that falls steadily, as 1/n does, is whole.
    """
    low, high = min(values), max(values)
    late = values[len(values) // 2 :]
    enough = (max(late) - min(late)) / _FLAT
    if len(values) < _LEAST or not 0 < enough < high - low:
        return low, high
    deep = max(map(abs, late)) < _DEEP * (high - low)
    most = max(1, int(len(values) * (_EARLY if deep else _FEW)))
    bottom, top = min(values[most:]), max(values[most:])
    if top - bottom > enough:
        return low, high
    for value in reversed(values[:most]):
        if max(top, value) - min(bottom, value) > enough:
            break
        bottom, top = min(bottom, value), max(top, value)
    return bottom, top


@dataclass(frozen=True)
class Ticks:
    """The round numbers of an axis.

    Attributes:
        labels: position and text of each.
        start: what has to be added to each; empty for 0.
    """

    labels: Sequence[tuple[float, str]]
    start: str = ""


class Scale:
    """Maps values to positions between two ends of an axis, in pixels.

    Args:
        low: smallest value.
        high: largest value.
        start: position of the smallest value.
        end: position of the largest value.
        log: whether the axis is logarithmic.
    """

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self._start, self._end, self._log = start, end, log
        if log:
            low, high = math.log10(low), math.log10(high)
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-300):
            room = 1.0 if log else abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        self._low, self._high = low, high

    def __call__(self, value: float) -> float:
        share = ((math.log10(value) if self._log else value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self, about: int, room: float) -> Ticks:
        """Return positions and labels of round numbers.

        Args:
            about: how many there may be, more or less.
            room: of a label, in pixels.
        """
        if self._log and self._high - self._low >= 1:
            first, last = max(math.ceil(self._low), _SMALLEST_POWER), math.floor(self._high)
            every = max(1, (last - first) // about)
            powers = range(first, last + 1, every)
            return Ticks([(self(10.0**power), f"{10.0**power:.4g}") for power in powers])
        low, high = (10**self._low, 10**self._high) if self._log else (self._low, self._high)
        rough = (high - low) / about
        if rough < _SMALLEST:
            return Ticks([])  # no round numbers lie between
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        if self._log:
            first = max(first, 1)
        count = sum(1 for number in range(first, first + 10) if number * step <= high + step * 1e-9)
        if not count:
            return Ticks([])
        labels, start = format_ticks(first, count, step, room)
        return Ticks([(self((first + number) * step), label) for number, label in enumerate(labels)], start)
