"""Durations, whatever the clock says."""

from __future__ import annotations

import time

import pytest

from notebook_accel.events import Failure
from notebook_accel.launch.durations import Start, format_duration


def test_the_seconds_until_a_failure() -> None:
    start = Start(wall=time.time(), moment=time.monotonic() - 60)
    here = Failure(rank=0, time=start.wall - 9e6, pid=1, moment=start.moment + 20)
    assert start.measure(here) == pytest.approx(20)
    assert start.measure(here, is_of_here=False) == 0
    elsewhere = Failure(rank=0, time=start.wall + 30, pid=1)
    assert start.measure(elsewhere) == pytest.approx(30)
    ahead = Failure(rank=0, time=start.wall + 9e6, pid=1)  # its clock is wrong
    assert 60 <= start.measure(ahead) <= start.seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.44, "0.4 s"), (12.3, "12 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_a_duration_as_people_say_it(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
