"""A call of a session from its first order to its last rank: ends, failures, stops."""

from __future__ import annotations

import time
from typing import Any

import pytest

from notebook_accel import events
from notebook_accel.session.call import Call
from notebook_accel.stream.sinks import TextSink

NOW = 1.0


class RecordingCall:
    """Takes orders and kills instead of workers."""

    def __init__(self, ranks: int = 2, **options: Any) -> None:
        self.orders: list[events.Order] = []
        self.killed: list[int] = []
        self.call = Call(
            number=4,
            name="f",
            ranks=frozenset(range(ranks)),
            pids={rank: 100 + rank for rank in range(ranks)},
            tell=self.orders.append,
            kill=self.killed.append,
            **options,
        )

    def end(self, rank: int, number: int = 4, positions: dict[str, int] | None = None) -> None:
        result = events.Result(rank=rank, time=NOW, value=b"")
        self.call.take(
            events.CallEnd(rank=rank, time=NOW, call=number, outcome=result, positions=positions or {})
        )

    def fail(self, rank: int) -> None:
        failure = events.Failure(rank=rank, time=NOW, pid=100 + rank)
        self.call.take(events.CallEnd(rank=rank, time=NOW, call=4, outcome=failure, positions={}))

    def advance_until(self, kind: type[events.Order] | None, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.call.advance(TextSink("none"))
            if self.killed if kind is None else any(isinstance(order, kind) for order in self.orders):
                return
            time.sleep(0.01)
        raise AssertionError(f"no {kind}: {self.orders}")


def test_who_asks_again_to_end_a_call_does_not_shorten_what_ranks_have_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accel.session.call._RELEASE_SECONDS", 60.0)
    recorded = RecordingCall()
    recorded.call.bring_back(0.0)
    recorded.advance_until(events.ReleaseOrder)
    recorded.call.bring_back(0.0)
    recorded.call.advance(TextSink("none"))
    assert not recorded.killed


def test_ranks_that_are_killed_before_their_time_get_no_other_order() -> None:
    recorded = RecordingCall()
    recorded.end(0)
    recorded.call.bring_back(0.0)
    recorded.call.kill_unfinished()
    recorded.call.advance(TextSink("none"))
    recorded.call.bring_back(0.0)
    recorded.call.advance(TextSink("none"))
    assert recorded.killed == [1] and recorded.call.interrupted == {1} and not recorded.orders


def test_a_late_end_of_another_call_is_not_this_ones() -> None:
    recorded = RecordingCall()
    recorded.end(0, number=3)
    assert recorded.call.unfinished == {0, 1}
    recorded.end(0)
    assert recorded.call.unfinished == {1} and recorded.call.results.keys() == {0}


def test_lines_that_wait_to_be_shown_count_one_by_one() -> None:
    call = RecordingCall().call
    call.take(events.Lines(rank=0, time=NOW, stream="stdout", texts=("a", "b", "c")))
    call.take(events.Metric(rank=0, time=NOW, values={"loss": 0.5}))
    assert len(call.waiting) == 2 and call.num_waiting == 4


def test_after_a_failure_the_others_are_brought_back_more_and_more_firmly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accel.session.call._RELEASE_SECONDS", 0.1)
    recorded = RecordingCall(grace=0.1)
    recorded.fail(0)
    recorded.call.advance(TextSink("none"))
    assert not recorded.orders
    recorded.advance_until(events.InterruptOrder)
    assert not recorded.call.was_released and recorded.call.interrupted == {1}
    recorded.advance_until(events.ReleaseOrder)
    assert recorded.call.was_released and [order.rank for order in recorded.orders] == [1, 1]
    recorded.advance_until(None)
    assert recorded.killed == [1]


def test_a_rank_that_comes_back_in_time_is_left_alone() -> None:
    recorded = RecordingCall(grace=0.1)
    recorded.fail(0)
    recorded.call.advance(TextSink("none"))
    recorded.end(1)
    assert not recorded.orders and not recorded.call.unfinished and not recorded.call.interrupted


def test_a_stop_gives_all_ranks_the_same_question() -> None:
    recorded = RecordingCall()
    recorded.call.stop(60.0)
    recorded.call.advance(TextSink("none"))
    assert [type(order) for order in recorded.orders] == [events.HoldOrder, events.HoldOrder]
    recorded.call.take(events.Held(rank=0, time=NOW, questions=3))
    recorded.call.take(events.Held(rank=1, time=NOW, questions=5))
    recorded.advance_until(events.StopOrder)
    stops = [order for order in recorded.orders if isinstance(order, events.StopOrder)]
    assert [(order.rank, order.question) for order in sorted(stops, key=lambda order: order.rank)] == [
        (0, 6),
        (1, 6),
    ]


def test_a_stop_interrupts_ranks_that_do_not_ask() -> None:
    recorded = RecordingCall()
    recorded.call.stop(60.0)
    recorded.call.advance(TextSink("none"))
    for rank in (0, 1):
        recorded.call.take(events.Held(rank=rank, time=NOW, questions=0))
    recorded.advance_until(events.InterruptOrder)
    assert recorded.call.was_interrupted


def test_a_wait_for_a_rank_that_does_not_answer_is_told_once() -> None:
    """A stopped process answers nothing, and the others wait for it."""
    recorded = RecordingCall(hang_timeout=0.04)
    notes: list[str] = []

    class Notes(TextSink):
        def note(self, text: str) -> None:
            notes.append(text)

    for _ in range(10):
        recorded.call.take(
            events.StackReport(rank=0, time=NOW, call=4, collective="barrier", seconds=9.0, frames=())
        )
        recorded.call.advance(Notes("none"))
        time.sleep(0.01)
    (note,) = notes
    assert note.startswith("rank 0 has waited for 9 s in barrier, which rank 1 has not entered:")
