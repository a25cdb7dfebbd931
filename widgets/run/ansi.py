"""Converts terminal escapes to HTML, with colours that can be read on light and on dark backgrounds."""

from __future__ import annotations

import functools
import html
import re
from typing import Final

_ESCAPE: Final = re.compile(r"\x1b(?:\[([0-9;:?]*)([ -/]*[@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])?")
_BASIC: Final = (
    (0, 0, 0),
    (205, 49, 49),
    (13, 188, 121),
    (180, 150, 16),
    (36, 114, 200),
    (188, 63, 188),
    (17, 168, 205),
    (128, 128, 128),
)
_LARGEST: Final = 255  # of the codes, and of the parts of a colour
_STEPS: Final = (0, 95, 135, 175, 215, 255)
_LIGHT: Final = 0.19  # relative luminance with a contrast above 4 to white and to #111 (WCAG 2.1, 1.4.3)


def strip_escapes(text: str) -> str:
    """Return a text without terminal escapes.

    Args:
        text: as a program writes it to a terminal.
    """
    return _ESCAPE.sub("", text) if "\x1b" in text else text


def to_html(text: str) -> str:
    """Return a text as HTML: special characters are escaped, and coloured parts become `span` elements.

    Args:
        text: as a program writes it to a terminal.
    """
    if "\x1b" not in text:
        return html.escape(text)
    parts: list[str] = []
    style: dict[str, str] = {}
    position = 0
    for found in _ESCAPE.finditer(text):
        _add(parts, text[position : found.start()], style)
        position = found.end()
        if found[2] == "m":
            _change(style, found[1] or "0")
    _add(parts, text[position:], style)
    return "".join(parts)


def _add(parts: list[str], text: str, style: dict[str, str]) -> None:
    if not text:
        return
    escaped = html.escape(text)
    if style:
        rules = ";".join(f"{name}:{value}" for name, value in style.items())
        escaped = f'<span style="{rules}">{escaped}</span>'
    parts.append(escaped)


def _change(style: dict[str, str], codes: str) -> None:
    """Apply the codes of one escape sequence (ECMA-48, 8.3.117)."""
    numbers = [_read_code(code) for code in re.split("[;:]", codes)]
    while numbers:
        number = numbers.pop(0)
        if number == 0:
            style.clear()
        elif number == 1:
            style["font-weight"] = "bold"
        elif number == 22:
            style.pop("font-weight", None)
        elif number == 3:
            style["font-style"] = "italic"
        elif number == 4:
            style["text-decoration"] = "underline"
        elif number in (38, 48):
            colour = _take_colour(numbers)
            if colour is not None:
                _set_colour(style, colour, is_background=number == 48)
        elif number == 39:
            style.pop("color", None)
        elif number == 49:
            style.pop("background", None)
        elif 30 <= number <= 37 or 90 <= number <= 97:
            _set_colour(style, _BASIC[number % 10], is_background=False)
        elif 40 <= number <= 47 or 100 <= number <= 107:
            _set_colour(style, _BASIC[number % 10], is_background=True)


def _read_code(text: str) -> int:
    """Return a code; 0 where none is written, and the largest one for numbers that no terminal knows."""
    if not text.isdecimal():
        return 0
    return min(int(text), _LARGEST) if len(text) < 10 else _LARGEST


def _take_colour(numbers: list[int]) -> tuple[int, int, int] | None:
    """Remove the codes of a colour, which follow 38 or 48, and return it; None if they are not a colour.

    The colour is one of 256, or red, green and blue.
    """
    kind = numbers.pop(0) if numbers else 0
    if kind == 2 and len(numbers) >= 3:
        red, green, blue = numbers[:3]
        del numbers[:3]
        return red, green, blue
    if kind != 5 or not numbers:
        return None
    number = numbers.pop(0)
    if number < 16:
        return _BASIC[number % 8]
    if number < 232:
        cube = number - 16
        return _STEPS[cube // 36 % 6], _STEPS[cube // 6 % 6], _STEPS[cube % 6]
    grey = 8 + 10 * (number - 232)
    return grey, grey, grey


def _set_colour(style: dict[str, str], colour: tuple[int, int, int], *, is_background: bool) -> None:
    if is_background:
        style["background"] = "rgba({},{},{},0.25)".format(*colour)
    elif max(colour) - min(colour) < 40:  # black, white and grey become the page's own colour
        style.pop("color", None)
    else:
        style["color"] = make_readable(colour)


@functools.lru_cache(maxsize=512)
def make_readable(colour: tuple[int, int, int]) -> str:
    """Return the shade of a colour that can be read on light and on dark backgrounds.

    Args:
        colour: red, green and blue, each from 0 to 255.

    Returns:
        A CSS colour such as `#1f77dc`, with the relative luminance `_LIGHT`.
    """
    linear = [_linear(min(255, part) / 255) for part in colour]
    light = _luminance(linear)
    if light < _LIGHT:  # towards white
        share = (_LIGHT - light) / (1 - light)
        linear = [part + (1 - part) * share for part in linear]
    else:
        linear = [part * _LIGHT / light for part in linear]
    return "#" + "".join(f"{round(255 * _encode(part)):02x}" for part in linear)


def _linear(part: float) -> float:
    return part / 12.92 if part <= 0.03928 else float(((part + 0.055) / 1.055) ** 2.4)


def _encode(part: float) -> float:
    return part * 12.92 if part <= 0.0031308 else float(1.055 * part ** (1 / 2.4) - 0.055)


def _luminance(linear: list[float]) -> float:
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
