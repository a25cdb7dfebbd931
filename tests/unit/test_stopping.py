"""Ranks agree on where they stop."""

from __future__ import annotations

import threading

from notebook_accel.stopping import StopPoint
from tests.unit.clock import wait_in


def test_nobody_stops_unasked() -> None:
    point = StopPoint()
    assert [point.reached() for _ in range(3)] == [False] * 3


def test_ranks_at_different_questions_stop_at_the_same_one() -> None:
    points = [StopPoint(), StopPoint(), StopPoint()]
    for point, asked in zip(points, (5, 9, 0), strict=True):
        for _ in range(asked):
            assert not point.reached()
    last = max(point.hold() for point in points) + 1
    for point in points:
        point.set(last)
    answers = [
        [point.reached() for _ in range(last - asked)] for point, asked in zip(points, (5, 9, 0), strict=True)
    ]
    assert [answer.index(True) for answer in answers] == [4, 0, 9]


def test_a_question_waits_while_the_ranks_agree() -> None:
    point = StopPoint()
    point.hold()
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(point.reached()))
    asking.start()
    wait_in(asking, "wait")
    assert not answers
    point.set(2)
    asking.join(60)
    assert answers == [False]
    assert point.reached()
    assert point.reached(), "the answer stays"


def test_a_stop_point_forgets() -> None:
    point = StopPoint()
    point.set(1)
    assert point.reached()
    point.reset()
    assert not point.reached()
