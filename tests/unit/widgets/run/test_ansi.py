"""Colours can be read: those of a terminal, and those of charts."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree

import pytest

from notebook_accel.stream.series import Point
from notebook_accel.widgets.run import ansi, chart, page


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
    found = set(re.findall("#[0-9a-f]{6}", " ".join(shades))) | set(chart.COLOURS)
    assert len(found) > 50
    assert min(contrast(colour, ground) for colour in found) > 4


@pytest.mark.parametrize("log", [False, True])
def test_text_in_a_saved_picture_can_be_read_whatever_the_theme(log: bool) -> None:
    values = [250.0, *(0.02 + step / 1e6 for step in range(60))]
    points = [Point(step, float(step), value) for step, value in enumerate(values)]
    source = re.search(
        'base64,([^"]*)', page.embed_chart(chart.make_panels({"loss": points}, 0.0), "", log=log)
    )
    assert source
    root = ElementTree.fromstring(base64.b64decode(source[1]))
    ground = next(iter(root))
    assert (ground.get("width"), ground.get("height")) == ("100%", "100%")
    (colour,) = re.findall("color:(#[0-9a-f]{6})", root.get("style", ""))
    texts = [each for each in root.iter() if each.tag.endswith("}text")]
    assert len(texts) > 8 and all(text.get("fill") == "currentColor" for text in texts)
    assert not any("opacity" in name for text in texts for name in text.attrib)
    assert contrast(colour, ground.get("fill", "")) >= 4.5


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
