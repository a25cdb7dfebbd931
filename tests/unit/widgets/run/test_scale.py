"""How far an axis reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from notebook_accel.widgets.run.scale import find_limits

LIVES = [0.02 + 0.002 * math.sin(number) for number in range(500)]


@pytest.mark.parametrize(
    "values",
    [
        [2.3 / (step + 1) for step in range(100)],
        [2.3 * math.exp(-step / 10) + 0.1 for step in range(100)],
        [0.95 - 0.85 * math.exp(-step / 5) for step in range(100)],
        [1 - 0.9 / (step / 6 + 1) for step in range(100)],
        [250 * 0.8**step for step in range(100)],
        [250.0, 100.0, 50.0],
        [1.0] * 100,
        [250.0] + [1.0] * 99,
        [1.0, 1.1] * 40 + [250.0] + [1.0] * 5,
        [1.0] * 5 + [50.0] + [1.0 - 0.001 * step for step in range(94)],
    ],
)
def test_curves_are_whole(values: Sequence[float]) -> None:
    assert find_limits(values) == (min(values), max(values))


@pytest.mark.parametrize(
    ("first", "hidden"),
    [
        ([250.0], 1),
        ([250.0, 30.0, 4.0, 0.03], 3),
        ([250 * 10 ** (-step / 10) for step in range(30)], None),  # of 100 steps
        ([0.02, -300.0], 2),
    ],
    ids=["one", "few", "a third", "a peak"],
)
def test_first_values_that_would_flatten_the_rest_are_left_out(
    first: Sequence[float], hidden: int | None
) -> None:
    values = [*first, *LIVES[:70]]
    low, high = find_limits(values)
    assert min(values[len(first) :]) >= low > -0.04 and max(values[len(first) :]) <= high < 0.07
    assert hidden is None or sum(not low <= value <= high for value in values) >= hidden - 1
    later = values[len(values) // 2 :]
    assert max(later) - min(later) >= 0.0999 * (high - low)


def test_no_more_are_left_out_than_has_to_be() -> None:
    values = [250.0, 30.0, 0.05, 0.03, *LIVES[:96]]
    _, high = find_limits(values)
    assert high == 0.05, "0.05 leaves more than a tenth of the height"


def test_one_value_that_flattens_a_line_far_from_zero_is_left_out() -> None:
    values = [250.0, *(20 + each for each in LIVES[:60])]
    assert find_limits(values) == (min(values[1:]), max(values[1:]))
