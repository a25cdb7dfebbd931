"""Tests for the colours of a terminal."""

from __future__ import annotations

import re

import pytest

from notebook_accel.widgets.run import ansi, chart


def contrast(colour: str, ground: str) -> float:
    def light(text: str) -> float:
        parts = [int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(colour), light(ground)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("ground", ["#ffffff", "#111111"])
def test_colours_can_be_read(ground: str) -> None:
    shades = [ansi.to_html(f"\x1b[38;5;{number}mx") for number in range(256)]
    found = set(re.findall("#[0-9a-f]{6}", " ".join(shades))) | set(chart.COLOURS) | {"#767676"}
    assert len(found) > 50
    assert min(contrast(colour, ground) for colour in found) > 4


def test_ansi_becomes_spans_and_html_is_escaped() -> None:
    assert ansi.to_html("<a> & b") == "&lt;a&gt; &amp; b"
    coloured = ansi.to_html(
        "\x1b[1;31m<b>\x1b[0m plain \x1b[2K\x1b]8;;http://x\x07link\x1b[38;2;1;200;3mg\x1b[39mz"
    )
    assert re.fullmatch(
        r'<span style="font-weight:bold;color:#[0-9a-f]{6}">&lt;b&gt;</span> plain link'
        r'<span style="color:#[0-9a-f]{6}">g</span>z',
        coloured,
    )
    assert ansi.strip_escapes("\x1b[31mred\x1b[0m") == "red"
