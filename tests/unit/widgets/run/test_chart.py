"""Tests for charts."""

from __future__ import annotations

import html
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest

from notebook_accel.stream.series import Point
from notebook_accel.widgets.run import chart
from notebook_accel.widgets.run.labels import measure

SVG = "{http://www.w3.org/2000/svg}"


def points(values: Sequence[float]) -> list[Point]:
    return [Point(step, 100.0 + step, value) for step, value in enumerate(values)]


VALUES = [
    [1.0, 2.0],
    [0.0, 0.0],
    [1e-300, 1e300],
    [-5.0, 5.0, math.nan, math.inf],
    [1e9, 1e9 + 1],
    [3.0, 0.03, 0.0],
    [1e308, 1.0, -1e308, 2.0],
    [250.0, -1e300, *(0.02 + number / 1e4 for number in range(40))],
]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("values", VALUES, ids=lambda values: str(values[:4]))
def test_charts_are_svg_within_their_frame(values: list[float], log: bool) -> None:
    panels = chart.make_panels({"loss <1>": points(values)}, 100.0, log=log)
    drawn = chart.render_svg(panels, "words <&>", log=log)
    drawable = [value for value in values if abs(value) <= 1e300 and (value > 0 or not log)]
    assert bool(drawn) == (len(drawable) > 1)
    if not drawn:
        return
    root = ElementTree.fromstring(drawn)
    width, height = (float(root.get(name, "")) for name in ("width", "height"))
    for path in root.iter(f"{SVG}path"):
        assert not re.search("nan|inf", path.get("d", ""))
        if path.get("stroke-width"):
            places = [tuple(map(float, pair.split())) for pair in re.split("[ML]", path.get("d", ""))[1:]]
            assert all(0 <= x <= width and 0 <= y <= height for x, y in places)


def find_titles(panels: list[chart.Panel]) -> list[str]:
    root = ElementTree.fromstring(chart.render_svg(panels, "words"))
    return [title.text or "" for title in root.iter(f"{SVG}title")]


def test_the_axis_is_steps_where_there_are_some() -> None:
    (panel,) = chart.make_panels({"loss": points([1, 2])}, 100.0)
    assert panel.axis == "step" and ">step</text>" in chart.render_svg([panel], "")
    for odd in (Point(None, 107.0, 3.0), Point(10**400, 107.0, 3.0)):  # no axis reaches that step
        first, second = chart.make_panels({"a": [*points([1, 2]), odd], "b": points([1, 2])}, 100.0)
        assert first.axis == "seconds" and first.series["a"][-1] == (7.0, 3.0)
        assert second.axis == "step"


def test_each_metric_has_a_scale_of_its_own() -> None:
    metrics = {"loss": points([250.0, 100.0, 50.0]), "rate": points([0.05, 0.03, 0.01])}
    panels = chart.make_panels(metrics, 100.0)
    assert [list(panel.series) for panel in panels] == [["loss"], ["rate"]]
    root = ElementTree.fromstring(chart.render_svg(panels, "words"))
    for line in root.iter(f"{SVG}path"):
        if line.get("stroke-width"):
            ys = [float(pair.split()[1]) for pair in re.split("[ML]", line.get("d", ""))[1:]]
            assert max(ys) - min(ys) > 80  # it is not flat


@pytest.mark.parametrize(
    "names",
    [
        ["loss", "eval_loss"],
        ["train/loss", "val/loss"],
        ["train_loss", "test_loss"],
        ["loss", "loss_eval"],
    ],
    ids=str,
)
def test_parts_of_the_data_share_a_chart(names: list[str]) -> None:
    (panel,) = chart.make_panels({name: points([1.0, 2.0]) for name in names}, 100.0)
    assert list(panel.series) == names
    assert len(set(re.findall('stroke="(#[^"]*)"', chart.render_svg([panel], "")))) == 2


@pytest.mark.parametrize(
    "names", [["eval_", "train_"], ["evaluate", "train"], ["retrain_loss", "loss"]], ids=str
)
def test_other_names_do_not(names: list[str]) -> None:
    assert len(chart.make_panels({name: points([1.0, 2.0]) for name in names}, 100.0)) == 2


def test_first_steps_do_not_flatten_the_rest() -> None:
    late = [0.02 + 0.01 * math.sin(number) for number in range(100)]
    (panel,) = chart.make_panels({"loss": points([250.0, 30.0, 4.0, *late])}, 100.0)
    drawn = chart.render_svg([panel], "")
    assert ">began at 250</text>" in drawn and ">0.020</text>" in drawn and ">200</text>" not in drawn
    assert "step 0\nloss 250" in find_titles([panel])
    logarithmic = chart.render_svg(
        chart.make_panels({"loss": points([250.0, *late])}, 100.0, log=True), "", log=True
    )
    assert ">10</text>" in logarithmic and "began" not in logarithmic


def test_a_later_peak_is_seen() -> None:
    (panel,) = chart.make_panels({"loss": points([1.0, 1.1] * 40 + [250.0] + [1.0] * 5)}, 100.0)
    drawn = chart.render_svg([panel], "")
    assert ">200</text>" in drawn and "began" not in drawn


def test_values_are_told_under_the_pointer() -> None:
    metrics = {"loss": points([3.0, 2.0, 1.0]), "eval_loss": [Point(0, 100.0, 5.0), Point(2, 102.0, 4.0)]}
    panels = chart.make_panels(metrics, 100.0)
    assert find_titles(panels) == [
        "step 0\nloss 3\neval_loss 5",
        "step 1\nloss 2\neval_loss 5",
        "step 2\nloss 1\neval_loss 4",
    ]
    areas = re.findall('coords="([0-9,]+)" title="([^"]*)"', chart.render_areas(panels))
    assert [html.unescape(words) for _, words in areas] == find_titles(panels)
    edges = [list(map(int, coords.split(","))) for coords, _ in areas]
    assert [right for _, _, right, _ in edges][:-1] == [left for left, *_ in edges][1:]
    many = chart.make_panels({f"m{number}": points([1.0, 2.0] * 5_000) for number in range(12)}, 100.0)
    assert len(find_titles(many)) <= 240 and len(chart.render_svg(many, "")) < 200_000


def test_charts_have_few_series_and_labels() -> None:
    many = {"once": points([7.0])} | {f"m{number}": points([1.0, 2.0]) for number in range(26)}
    panels = chart.make_panels(many, 100.0)
    drawn = chart.render_svg(panels, chart.describe_last_values(many))
    assert drawn.count('stroke-width="1.8"') == len(panels) == chart.MAX_SERIES == 12
    values = chart.render_values(many, panels)
    assert "once <b>7</b>" in values and "m12 <b>2</b>" in values and "m11" not in values
    assert "and 3 more" in values
    assert 'aria-label="step 1: once 7, ' in drawn
    assert chart.render_values({"a": many["m1"]}, chart.make_panels({"a": many["m1"]}, 100.0)) == ""


def find_texts(panels: list[chart.Panel]) -> list[tuple[float, float, float, str]]:
    """Return the left and the right edge, the height and the words of each text of one chart."""
    found = []
    for text in ElementTree.fromstring(chart.render_svg(panels, "")).iter(f"{SVG}text"):
        words = "".join(text.itertext())
        wide, x = measure(words), float(text.get("x", ""))
        left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
        found.append((left, left + wide, float(text.get("y", "")), words))
    return found


@pytest.mark.parametrize("start", [123456789.0, -123456789.0, 1e-7, 1e9 + 0.125, 1e300])
@pytest.mark.parametrize("step", [4096.0, 0.001, 1e-9])
def test_no_label_is_cut_off(start: float, step: float) -> None:
    many = [Point(123_000_000 + at, 100.0, start + step * at) for at in range(100)]
    for left, right, _, words in find_texts(chart.make_panels({"tokens": many}, 100.0)):
        assert left >= -0.5 and right <= chart.WIDTH + 0.5, words


@pytest.mark.parametrize(
    ("first", "words"),
    [([250.0, 300.0, 4.0], "began at 250"), ([0.02, 300.0], "reached 300 at first")],
)
def test_what_is_said_of_hidden_values_is_true_and_below_the_chart(first: list[float], words: str) -> None:
    late = [0.02 + 0.01 * math.sin(number) for number in range(100)]
    panels = chart.make_panels({"loss": points([*first, *late])}, 100.0)
    ((_, _, height, _),) = [each for each in find_texts(panels) if each[3] == words]
    lowest = max(height for _, _, height, label in find_texts(panels) if label.startswith("0.0"))
    assert height > lowest + 10


def read_lines(panels: list[chart.Panel]) -> list[list[str]]:
    """Return the pieces of each path of values: lines, dots and marks."""
    root = ElementTree.fromstring(chart.render_svg(panels, "words"))
    paths = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width")]
    return [path.get("d", "").split("M")[1:] for path in paths]


def test_a_line_breaks_where_a_value_is_not_finite_and_the_axis_has_a_mark_there() -> None:
    values = [math.nan if step in (10, 11, 12, 20) else 1.0 + step for step in range(31)]
    panels = chart.make_panels({"loss": points(values)}, 100.0)
    line, marks = read_lines(panels)
    assert [len(piece.split("L")) for piece in line] == [10, 7, 10]
    assert len(marks) == 2
    titles = find_titles(panels)
    assert titles[-1] == "loss nan at step 10 to 12, 20"
    assert titles[9:14] == [f"step {step}\nloss {values[step]:g}" for step in range(9, 14)]


def test_a_value_between_two_gaps_is_a_dot() -> None:
    panels = chart.make_panels({"loss": points([1.0, 2.0, math.inf, 1.5, math.nan, 2.0, 1.0])}, 100.0)
    line, dots, _ = read_lines(panels)
    assert len(line) == 2 and len(dots) == 1
    start, end = dots[0].split("L")
    assert start == end and 'stroke-linecap="round"' in chart.render_svg(panels, "")
    assert find_titles(panels)[-1] == "loss inf or nan at step 2, 4"


@pytest.mark.parametrize("log", [False, True])
def test_a_run_that_ends_with_nan_says_so_in_its_title_and_under_the_pointer(log: bool) -> None:
    panels = chart.make_panels({"loss": points([3.0, 2.0, math.nan, math.nan])}, 100.0, log=log)
    drawn = chart.render_svg(panels, "", log=log)
    assert '<tspan font-weight="600">nan</tspan>' in drawn
    assert "<title>step 3\nloss nan</title>" in drawn and 'title="step 3\nloss nan"' in chart.render_areas(
        panels
    )
    assert panels[0].series["loss"][-1][0] == 3.0, "the axis goes as far as the run"


def test_one_nan_of_many_values_is_seen_and_many_are_a_small_picture() -> None:
    values = [math.nan if step == 7_777 else math.sin(step / 100) for step in range(10_000)]
    panels = chart.make_panels({"loss": points(values)}, 100.0)
    line, marks = read_lines(panels)
    assert len(line) == 2 and len(marks) == 1
    assert "step 7777\nloss nan" in find_titles(panels), "the pointer stops there"
    stretch = {*range(5_000, 5_010), 5_013, *range(9_000, 9_990)}
    panels = chart.make_panels(
        {"loss": points([math.nan if step in stretch else 1.0 for step in range(10_000)])}, 100.0
    )
    assert find_titles(panels)[-1] == "loss nan at step 5000 to 5009, 5013, 9000 to 9989"
    odd = points([math.nan if step % 2 else float(step) for step in range(10_000)])
    many = chart.make_panels({f"m{number}": odd for number in range(12)}, 100.0)
    assert len(chart.render_svg(many, "")) < 300_000


def test_a_run_without_two_values_has_no_chart_but_its_last_value() -> None:
    metrics = {"loss": points([1.0, math.nan, math.nan])}
    assert chart.make_panels(metrics, 100.0) == []
    assert "loss <b>nan</b>" in chart.render_values(metrics, [])
