"""Axes: which values they reach, where a value lies on them, and their round numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_SMALLEST: Final = 1e-300  # between two ticks
_SMALLEST_POWER: Final = -323  # of 10 that is not 0
_EARLY: Final = 0.2  # of the points, which need not all be seen
_FLAT: Final = (
    4.0  # times as far do all values reach as those after the early ones: the rest would be a flat line
)


def find_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value that an axis has to reach.

    Args:
        values: of one line, in the order of x; at least one.

    Returns:
        The limits of all values; those of the later ones where the first fifth would make a flat line of the rest, as a
        loss does that begins at 250 and lives at 0.02.
    """
    low, high = min(values), max(values)
    late = values[math.ceil(len(values) * _EARLY) :]
    if len(late) < 2:
        return low, high
    bottom, top = min(late), max(late)
    if top > bottom and high - low > _FLAT * (top - bottom):
        return bottom, top
    return low, high


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

    def ticks(self, about: int = 5) -> list[tuple[float, str]]:
        """Return positions and labels of round numbers.

        Args:
            about: how many there may be, more or less.
        """
        if self._log and self._high - self._low >= 1:
            first, last = max(math.ceil(self._low), _SMALLEST_POWER), math.floor(self._high)
            every = max(1, (last - first) // about)
            return [(self(10.0**power), f"{10.0**power:.4g}") for power in range(first, last + 1, every)]
        low, high = (10**self._low, 10**self._high) if self._log else (self._low, self._high)
        rough = (high - low) / about
        if rough < _SMALLEST:
            return []  # no round numbers lie between
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        values = [number * step for number in range(first, first + 10) if number * step <= high + step * 1e-9]
        return [(self(value), f"{value:.6g}") for value in values if not self._log or value > 0]
