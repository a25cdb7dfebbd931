"""Runs beside each other: their table, and charts with a line for each of them."""

from __future__ import annotations

import base64
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accel.stream.series import Point
from notebook_accel.widgets.run import chart
from notebook_accel.widgets.run.comparison import RunList, render_comparison


def make_run(
    name: str, losses: list[float], status: str = "done", number: int = 1, **metrics: list[float]
) -> Any:
    series = {"loss": losses, **metrics}
    points = {
        key: [Point(step, 100.0 + step, value) for step, value in enumerate(values)]
        for key, values in series.items()
    }
    return SimpleNamespace(
        record=SimpleNamespace(metrics=points),
        job=SimpleNamespace(name=name, local_world_size=2),
        started=100.0,
        seconds=3.0,
        steps=0,
        status=status,
        number=number,
        is_over=True,
    )


def read_svg(page: str) -> str:
    found = re.search(r"base64,([^\"]+)", page)
    assert found
    return base64.b64decode(found[1]).decode()


def test_a_metric_of_several_runs_is_one_panel_with_the_colours_of_the_runs() -> None:
    first = chart.Compared({"loss": [Point(0, 1.0, 3.0), Point(1, 2.0, 2.0)]}, 0.0)
    second = chart.Compared(
        {"lr": [Point(0, 1.0, 0.1), Point(1, 2.0, 0.2)], "loss": [Point(0, 1.0, 4.0), Point(2, 2.0, 1.0)]},
        0.0,
    )
    loss, rate = chart.compare_panels({"0": first, "1": second})
    assert (loss.title, rate.title) == ("loss", "lr")
    assert loss.series == {"0": [(0.0, 3.0), (1.0, 2.0)], "1": [(0.0, 4.0), (2.0, 1.0)]}
    assert list(rate.series) == ["1"] and rate.colours["1"] == loss.colours["1"] == chart.COLOURS[1]
    assert loss.last == {"0": 2.0, "1": 1.0}


def test_without_steps_each_run_begins_at_its_own_launch() -> None:
    runs = {
        str(number): chart.Compared({"loss": [Point(None, start + t, 1.0 + t) for t in (1.0, 2.0)]}, start)
        for number, start in enumerate((100.0, 500.0))
    }
    (panel,) = chart.compare_panels(runs)
    assert panel.axis == "seconds"
    assert panel.series["0"] == panel.series["1"] == [(1.0, 2.0), (2.0, 3.0)]


def test_the_page_has_a_row_for_each_run_and_needs_no_script() -> None:
    first = make_run("<train>", [3.0, 2.0], lr=[0.1, 0.2])
    runs = RunList([first, make_run("train", [4.0, 1.0], "failed", number=2)])
    page = runs._repr_html_()
    assert "&lt;train&gt;" in page and "<script" not in page
    assert page.count("<tr>") == 3 and "✗ failed" in page
    assert "steps</th>" not in page, "none has made any"
    svg = read_svg(page)
    assert ">loss</tspan>" in svg and ">lr</tspan>" in svg
    assert chart.COLOURS[0] in svg and chart.COLOURS[1] in svg


def test_the_line_of_a_run_breaks_where_its_values_are_nan() -> None:
    values = [4.0, 1.0, math.nan, 2.0, 3.0]
    svg = read_svg(
        RunList([make_run("one", [3.0, 2.0]), make_run("two", values, number=2)])._repr_html_() or ""
    )
    paths = re.findall(r'<path d="([^"]*)" stroke="(#[^"]*)" stroke-width="1.8"', svg)
    assert [(path.count("M"), colour) for path, colour in paths] == [
        (1, chart.COLOURS[0]),
        (2, chart.COLOURS[1]),
    ]
    assert "<title>2 nan at step 2</title>" in svg


def test_a_part_of_the_list_is_compared_too_and_no_run_is_nothing() -> None:
    runs = RunList([make_run("one", [3.0, 2.0]), make_run("two", [4.0, 1.0], number=2)])
    assert isinstance(runs[1:], RunList) and runs[1].job.name == "two"
    assert ">one<" not in runs[1:]._repr_html_() and ">two<" in runs[1:]._repr_html_()
    assert render_comparison([]) == "" and RunList()._repr_html_() is None


def test_a_run_has_its_number_and_colour_in_any_part_of_the_list() -> None:
    runs = RunList([make_run("train", [3.0, 2.0], number=number) for number in range(4, 13)])
    for part in (runs, runs[-2:]):
        page = render_comparison(part)
        assert f'<span style="color:{chart.COLOURS[11 % 8]}">━</span> <b>12</b>' in page
        assert chart.COLOURS[11 % 8] in read_svg(page)
    assert runs.find(12) is runs[-1] and runs[-2:].find(11) is runs[-2]
    with pytest.raises(ValueError, match="run 3 is not in the list: it has 4, 5, 6, 7, 8, 9, 10, 11, 12"):
        runs.find(3)


def test_a_metric_named_like_a_column_does_not_replace_it() -> None:
    page = render_comparison([make_run("train", [3.0, 2.0], time=[7.125, 8.125], status="done")])
    assert "3.0 s" in page and page.count("time</th>") == 1


@pytest.mark.parametrize("count", [2, 4, 9])
def test_a_long_name_of_a_metric_leaves_room_for_the_names_of_the_runs(count: int) -> None:
    runs = {}
    for number in range(count):
        points = [Point(step, 0.0, 0.9 + step / 100) for step in range(3)]
        metrics = {"val/accuracy of the long named set": points, "lr": points}
        runs[str(10 + number)] = chart.Compared(metrics, 0.0)
    svg = chart.render_svg(chart.compare_panels(runs), "")
    first, _ = re.findall(r'<text x="60" y="14"[^>]*>(.*?)</text>', svg)
    text = re.sub(r"<[^>]+>", "", first)
    assert text.startswith("val") and "…" in text
    assert re.findall("━ ?([0-9]+)", text) == list(runs) and ("0.92" in text) == (count == 2)
    seen = re.sub(" +", " ", text)  # as SVG does
    assert len(seen.replace(" ", "")) * 6.8 + seen.count(" ") * 3.5 < 254, text


def test_of_many_runs_a_small_chart_says_as_much_as_fits() -> None:
    for count in (2, 3, 8, 30):
        runs = {}
        for number in range(count):
            points = [Point(step, 0.0, 12345.678 * number + step) for step in range(3)]
            runs[str(number)] = chart.Compared({"loss": points, "lr": points}, 0.0)
        svg = chart.render_svg(chart.compare_panels(runs), "")
        titles = re.findall(r'<text x="60" y="14"[^>]*>(.*?)</text>', svg)
        assert len(titles) == 2
        for title in titles:
            text = re.sub(r"<[^>]+>", "", title)
            assert text.startswith(("loss", "lr"))
            assert len(text) * 6.5 < 320, text


@pytest.mark.parametrize(
    ("count", "words"), [(11, ""), (12, "and 1 more metric,"), (29, "and 18 more metrics,")]
)
def test_metrics_that_are_not_shown_are_counted(count: int, words: str) -> None:
    page = render_comparison([make_run("f", [1.0, 0.5], **{f"m{n}": [1.0, 2.0] for n in range(count)})])
    assert ("more metric" in page) == bool(words) and words in page
