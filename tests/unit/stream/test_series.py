"""Which values of metrics are kept where there are too many."""

from __future__ import annotations

import itertools
import math

import pytest

from notebook_accel.stream.series import MAX_NAMES, Metrics, Point, Series


def point(number: int, value: float) -> Point:
    return Point(number, 100.0 + number, value)


@pytest.mark.parametrize("count", [1, 2, 10, 11, 12, 23, 100, 1_001])
def test_what_is_kept_spreads_over_all_values(count: int) -> None:
    series = Series(10)
    for number in range(count):
        series.add(point(number, math.sin(number)))
    kept = [each.step or 0 for each in series]
    assert kept == sorted(set(kept)) and kept[0] == 0 and series[-1].step == count - 1
    assert len(series) == len(kept) <= 13
    values = [math.sin(number) for number in range(count)]
    assert min(each.value for each in series) == min(values)
    assert max(each.value for each in series) == max(values)
    gaps = [later - earlier for earlier, later in itertools.pairwise(kept)]
    assert max(gaps, default=1) <= max(1, 2 * count / 10), "no part of the run is left out"


def test_up_to_the_bound_every_value_is_kept() -> None:
    series = Series(10)
    for number in range(10):
        series.add(point(number, float(number)))
    assert [each.step for each in series] == list(range(10))


@pytest.mark.parametrize("sign", [1, -1])
def test_values_that_only_fall_or_rise_are_spread_too(sign: int) -> None:
    series = Series(10)
    for number in range(10_000):
        series.add(point(number, sign * float(number)))
    kept = [each.step or 0 for each in series]
    assert len(kept) <= 11 and kept[len(kept) // 2] in range(3_000, 7_000)


def test_extremes_are_numbers() -> None:
    series = Series(2)
    for number, value in enumerate([1.0, math.nan, 7.0, math.inf, -math.inf, -3.0, 2.0, math.nan, 1.0, 1.0]):
        series.add(point(number, value))
    assert {7.0, -3.0} <= {each.value for each in series}


def test_the_first_value_that_is_not_finite_stays() -> None:
    series = Series(10)
    for number in range(1_000):
        series.add(point(number, math.nan if number in (333, 335) else math.sin(number)))
    assert [each.step for each in series if math.isnan(each.value)] == [333]
    kept = [each.step or 0 for each in series]
    assert kept == sorted(set(kept)) and len(kept) <= 14


def test_series_that_take_too_much_together_are_thinned_alike() -> None:
    metrics = Metrics(2_000_000, 10_000)
    for step in range(3_000):
        for name in ("loss", "accuracy", "rate", "norm"):
            metrics.add(name, point(step, float(step)))
        metrics.add(f"once {step // 100}", point(step, 1.0))
    assert metrics.num_bytes <= 2_000_000
    kept = [[each.step for each in metrics.series[name]] for name in ("loss", "accuracy", "rate", "norm")]
    assert all(steps == kept[0] for steps in kept) and len(kept[0]) > 1_000
    assert all(f"once {number}" in metrics.series for number in range(30))


def test_names_without_news_are_forgotten() -> None:
    metrics = Metrics(50_000_000, 10_000)
    for step in range(3 * MAX_NAMES):
        metrics.add("loss", point(step, 1.0))
        metrics.add(f"of step {step}", point(step, 1.0))
    assert len(metrics.series) == MAX_NAMES and next(iter(metrics.series)) == "loss"
    assert f"of step {3 * MAX_NAMES - 1}" in metrics.series and "of step 0" not in metrics.series
    assert len(metrics.series["loss"]) == 3 * MAX_NAMES


def test_one_name_too_many_in_each_step_leaves_the_others_whole() -> None:
    metrics = Metrics(50_000_000, 10_000)
    for step in range(5):
        for number in range(MAX_NAMES + 1):
            metrics.add(f"norm of {number}", point(step, 1.0))
    assert len(metrics.series) == MAX_NAMES
    assert sum(len(series) == 5 for series in metrics.series.values()) == MAX_NAMES - 1
