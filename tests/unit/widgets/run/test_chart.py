"""Tests for charts."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from notebook_accel.stream.series import Point
from notebook_accel.widgets.run import chart


def points(values: Sequence[float]) -> list[Point]:
    return [Point(step, 100.0 + step, value) for step, value in enumerate(values)]


def test_downsampling_keeps_extremes_and_ends() -> None:
    noise = random.Random(0)
    pairs = [(float(x), noise.gauss(0, 1)) for x in range(12_345)]
    pairs[7777] = (7777.0, 50.0)
    pairs[3] = (3.0, -50.0)
    kept = chart.downsample(pairs)
    assert len(kept) <= chart.MAX_POINTS == 500
    assert {pairs[0], pairs[-1], pairs[7777], pairs[3]} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert chart.downsample(pairs[:500]) == pairs[:500]
    assert len(chart.downsample(pairs[:501])) <= 500


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [1.0],
        [0.0, 0.0],
        [1e-300, 1e300],
        [-5.0, 5.0, math.nan, math.inf],
        [1e9, 1e9 + 1],
        [3.0, 0.03, 0.0],
        [1e308, 1.0, -1e308],
    ],
    ids=str,
)
def test_charts_are_svg_within_their_frame(values: list[float], log: bool) -> None:
    drawn = chart.render_svg({"loss <1>": points(values)}, 100.0, log=log)
    if log and not any(value > 0 for value in values):
        assert drawn == ""
        return
    root = ElementTree.fromstring(drawn)
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        assert not re.search("nan|inf", path.get("d", ""))
        if path.get("stroke-width"):
            places = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path.get("d", ""))[1:]]
            assert all(0 <= x <= chart.WIDTH and 0 <= y <= chart.HEIGHT for x, y in places)


def test_the_axis_is_steps_where_there_are_some() -> None:
    axis, _ = chart.make_series({"loss": points([1, 2])}, 100.0)
    assert axis == "step"
    axis, series = chart.make_series({"loss": [*points([1, 2]), Point(None, 107.0, 3.0)]}, 100.0)
    assert axis == "seconds" and series["loss"][-1] == (7.0, 3.0)
    axis, series = chart.make_series({"loss": [*points([1, 2]), Point(10**400, 107.0, 3.0)]}, 100.0)
    assert axis == "seconds" and series["loss"][-1] == (7.0, 3.0)  # no axis reaches that step


def test_charts_have_few_series_and_labels() -> None:
    many = {f"m{number}": points([1.0, 2.0]) for number in range(15)}
    drawn = chart.render_svg(many, 100.0)
    assert drawn.count('stroke-width="1.8"') == chart.MAX_SERIES
    assert "and 3 more" in chart.render_legend(many)
    assert 'aria-label="step 1: m0 2, ' in drawn and ">step</text>" in drawn
