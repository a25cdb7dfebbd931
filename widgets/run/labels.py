"""Numbers as a chart writes them: short, and no wider than there is room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_LARGE: Final = 1e6  # from here on numbers have a letter
_THOUSANDS: Final = 1e4  # from here on differences have one
_LETTERS: Final = {3: "k", 6: "M", 9: "G", 12: "T"}  # by power of 10
_HUGE: Final = 1e15  # from here on they have an exponent
_SMALL: Final = 1e-3  # below, too
_MOST_DECIMALS: Final = 15
_WIDTHS: Final = {".": 3.6, ",": 3.6, "-": 4.1, "+": 9.3, "M": 9.6, "G": 8.6, "T": 6.8, " ": 3.6}
"""Pixels of letters in a wide font of 11 px; others, as digits, take `_DIGIT`."""
_DIGIT: Final = 7.1


def measure(text: str) -> float:
    """Return about how wide a number is in a chart, in pixels; rather too much than too little.

    Args:
        text: the number.
    """
    return sum(_WIDTHS.get(letter, _DIGIT) for letter in text)


def format_short(value: float) -> str:
    """Return a number with four digits, such as `0.02146` and `123.5M`.

    Args:
        value: the number.
    """
    if _LARGE <= abs(value) < _HUGE:
        power = _find_power(value) // 3 * 3
        return f"{value / 10**power:.4g}{_LETTERS[power]}"
    return f"{value:.0f}" if 1e4 <= abs(value) < _LARGE else f"{value:.4g}"


def format_long(value: float) -> str:
    """Return a number with six digits, or all digits of a large one before its point.

    Args:
        value: the number.
    """
    return f"{value:,.0f}" if _LARGE <= abs(value) < _HUGE else f"{value:.6g}"


def format_ticks(first: int, count: int, step: float, room: float) -> tuple[list[str], str]:
    """Return the labels of an axis.

    Args:
        first: the first tick, in steps from 0.
        count: how many ticks there are; at least one.
        step: between two ticks: 1, 2 or 5 times a power of 10.
        room: of a label, in pixels.

    Returns:
        The labels, and an empty text. Where they would be too wide, the differences to the first tick, and that.
    """
    labels = _format_steps(range(first, first + count), step)
    if max(map(measure, labels)) <= room:
        return labels, ""
    base = first * step
    decimals = max(0, -_find_power(step))
    start = f"{base:,.{decimals}f}" if abs(base) < _HUGE and decimals <= _MOST_DECIMALS else f"{base:.12g}"
    return [f"+{label}" for label in _format_steps(range(count), step, shortest=True)], start


def _format_steps(numbers: Sequence[int], step: float, *, shortest: bool = False) -> list[str]:
    largest = max(map(abs, numbers)) * step
    power, suffix = 0, ""
    if (_THOUSANDS if shortest else _LARGE) <= largest < _HUGE:
        power = _find_power(largest) // 3 * 3
        suffix = _LETTERS[power]
    elif largest and not _SMALL <= largest < _HUGE:
        power = _find_power(step if shortest else largest)
        suffix = f"e{power}"
    decimals = min(max(0, power - _find_power(step)), _MOST_DECIMALS)
    return [f"{number * step / 10.0**power:.{decimals}f}{suffix}" if number else "0" for number in numbers]


def _find_power(value: float) -> int:
    """Return the power of 10 in a number. A little below 10 counts as 10, because steps are not exact."""
    return math.floor(math.log10(abs(value)) + 1e-9)
