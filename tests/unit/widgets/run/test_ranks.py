"""Metrics of ranks laid over each other."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from notebook_accel.events import Metric
from notebook_accel.stream.record import RunRecord
from notebook_accel.stream.series import Point
from notebook_accel.widgets.run import page, ranks
from notebook_accel.widgets.run.chart import COLOURS
from notebook_accel.widgets.run.picture import Picture


def log(*values: float, start: int = 0) -> list[Point]:
    return [Point(start + number, 100.0 + number, value) for number, value in enumerate(values)]


def make_picture(metrics: dict[int, Any], measured: tuple[int, ...] = ()) -> Picture:
    return Picture(
        name="train",
        status="done",
        seconds=1.0,
        started=100.0,
        metrics=metrics[min(metrics)],
        measured=measured or tuple(metrics),
        rank_metrics=metrics,
    )


def test_a_chart_has_a_line_and_a_colour_for_each_rank_and_values_under_the_pointer() -> None:
    picture = make_picture({rank: {"loss": log(3.0, 2.0 + rank), "lr": log(0.1, 0.2)} for rank in (0, 3)})
    drawn = page.render_chart(picture)
    for number, rank in enumerate((0, 3)):
        assert f'<span style="color:{COLOURS[number]}">━</span> {rank}</span>' in drawn
        assert drawn.count(f'stroke="{COLOURS[number]}"') == 2, "of the loss, and of the rate"
    assert "<title>step 1\nrank 0 2\nrank 3 5</title>" in drawn
    assert "each rank, step 1: loss 2" in drawn


def test_the_line_of_each_rank_breaks_at_its_own_nan() -> None:
    values = [1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 1.0, 3.0]
    odd = [*values[:2], math.nan, *values[3:6], math.nan, values[7]]
    drawn = page.render_chart(make_picture({0: {"loss": log(*values)}, 3: {"loss": log(*odd)}}))
    paths = re.findall(r'<path d="([^"]*)" stroke="(#[^"]*)" stroke-width="1.8"', drawn)
    assert [(path.count("M"), colour) for path, colour in paths] == [(1, COLOURS[0]), (2, COLOURS[1])]
    assert "<title>rank 3 nan at step 2, 6</title>" in drawn and "rank 0 nan" not in drawn
    assert "<title>step 2\nrank 0 3\nrank 3 nan</title>" in drawn


def test_what_one_rank_alone_logs_has_a_chart_too() -> None:
    picture = make_picture({0: {"loss": log(1.0, 2.0)}, 1: {"loss": log(1.0, 3.0), "own": log(7.0, 8.0)}})
    titles = [(panel.title, list(panel.series)) for panel in ranks.make_panels(picture)]
    assert titles == [("loss", ["rank 0", "rank 1"]), ("own", ["rank 1"])]
    colours = {panel.colours["rank 1"] for panel in ranks.make_panels(picture)}
    assert colours == {COLOURS[1]}, "a rank has one colour everywhere"


def test_lines_are_thinned_as_a_saved_page_has_all_of_them() -> None:
    long = log(*(math.sin(number) for number in range(10_000)))
    (panel,) = ranks.make_panels(make_picture({rank: {"loss": long} for rank in range(8)}))
    assert max(len(points) for points in panel.series.values()) <= ranks.POINTS
    assert len(page.render_page(make_picture({rank: {"loss": long} for rank in range(8)}))) < 150_000


@pytest.mark.parametrize(
    ("measured", "chosen", "failed", "laid"),
    [
        ((0, 1), (), (), [0, 1]),
        (range(64), (), (), [*range(8)]),
        (range(64), (), (40, 41), [0, 1, 2, 3, 4, 5, 40, 41]),
        (range(64), (9, 60, 3), (40,), [3, 9, 60]),
        (range(64), range(20, 40), (), [*range(20, 28)]),
        (range(4), (9,), (), [0, 1, 2, 3]),
        ((), (), (), []),
    ],
)
def test_which_ranks_are_laid_over_each_other(measured: Any, chosen: Any, failed: Any, laid: Any) -> None:
    assert ranks.choose_laid(measured, chosen, failed) == laid


def test_the_legend_says_that_there_are_more_ranks() -> None:
    picture = make_picture({rank: {"loss": log(1.0, 2.0)} for rank in (0, 5)}, measured=tuple(range(64)))
    text = re.sub("<[^>]*>", " ", ranks.render_legend(picture)).split()
    assert text == ["ranks", "━", "0", "━", "5", "of", "64"]


def test_a_page_has_the_ranks_where_they_differ() -> None:
    same = {rank: {"loss": log(1.0, math.nan), "eval": log(2.0, start=rank)} for rank in range(2)}
    assert ranks.are_alike(same) and "metrics of each rank" not in page.render_page(make_picture(same))
    other = {0: {"loss": log(1.0, 2.0)}, 1: {"loss": log(1.0, 2.5)}}
    shown = page.render_page(make_picture(other))
    assert ">metrics of each rank</summary>" in shown
    assert 'title="step 1\nrank 0 2\nrank 1 2.5"' in shown, "the page has the values under the pointer"
    alone = make_picture({0: {"loss": log(1.0, 2.0)}})
    assert "metrics of each rank" not in page.render_page(alone)


def test_values_without_a_step_are_compared_by_their_order() -> None:
    def without(*values: float) -> dict[str, list[Point]]:
        return {"loss": [Point(None, 100.0 + number, value) for number, value in enumerate(values)]}

    assert ranks.are_alike({0: without(1.0, 2.0), 1: without(1.0, 2.0)})
    assert not ranks.are_alike({0: without(1.0, 2.0), 1: without(2.0, 1.0)})


def test_a_metric_with_one_value_is_told_below_the_charts() -> None:
    metrics = {rank: {"loss": log(1.0, 2.0), "eval": log(4.5)} for rank in range(2)}
    drawn = page.render_chart(make_picture(metrics))
    assert ">eval <b>4.5</b>" in drawn and ">loss <b>" not in drawn


def test_what_is_read_of_a_record() -> None:
    record = RunRecord()
    for rank in (2, 0, 1):
        record.apply(Metric(rank=rank, time=1.0, values={"loss": float(rank)}, step=3))
    assert ranks.read_metrics(record, (0, 2, 9)) == {
        0: {"loss": (Point(3, 1.0, 0.0),)},
        2: {"loss": (Point(3, 1.0, 2.0),)},
        9: {},
    }
