"""A call of a session from its first order to its last rank: ends, failures, stops."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

import pytest

from notebook_accel import events
from notebook_accel.errors import WorkerError
from notebook_accel.events import StackReport
from notebook_accel.launch.supervise import hang_watch
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.worker_group import Attempt, Member, WorkerGroup
from notebook_accel.session.call import Call
from notebook_accel.stream.record import RunRecord
from tests.unit.clock import wait_until
from tests.unit.jobs import make_job

NOW = 1.0


class RecordingGroup(WorkerGroup[Member]):
    """Ranks that do nothing: what they are told is kept."""

    def __init__(self, ranks: int, hang_timeout: float | None = None) -> None:
        self.orders: list[events.Order] = []
        self.shown: list[events.Event] = []
        job = make_job(local_world_size=ranks, hang_timeout=hang_timeout)
        super().__init__(Attempt(job=job, record=RunRecord(), deliver=self.shown.extend, control=Control()))
        self._members = [Member(rank=rank, pid=100 + rank) for rank in range(ranks)]

    def start(self) -> None: ...

    def tell(self, order: events.Order) -> None:
        self.orders.append(order)

    def receive(self, timeout: float) -> Sequence[events.Event]:
        return []

    def note_ends(self) -> None: ...

    def close(self) -> None: ...


class RecordingCall:
    """A call of such ranks."""

    def __init__(self, ranks: int = 2, grace: float = 1.0) -> None:
        self.group = RecordingGroup(ranks)
        self.call = Call(number=4, name="f", ranks=frozenset(range(ranks)), group=self.group, grace=grace)

    @property
    def orders(self) -> list[events.Order]:
        return [order for order in self.group.orders if not isinstance(order, events.SignalOrder)]

    @property
    def killed(self) -> list[int]:
        signals = [order for order in self.group.orders if isinstance(order, events.SignalOrder)]
        assert all(order.signum == signal.SIGKILL for order in signals)
        return [order.rank for order in signals]

    def end(self, rank: int, number: int = 4) -> None:
        result = events.Result(rank=rank, time=NOW, value=b"")
        self.call.take(events.CallEnd(rank=rank, time=NOW, call=number, outcome=result, collectives={}))

    def fail(self, rank: int) -> None:
        failure = events.Failure(rank=rank, time=NOW, pid=100 + rank)
        self.call.take(events.CallEnd(rank=rank, time=NOW, call=4, outcome=failure, collectives={}))

    def advance_until(self, count: int, kind: type[events.Order] = events.InterruptOrder) -> None:
        """Advance until so many orders of a kind were sent; signals are those that kill."""
        deadline = time.monotonic() + 60.0
        while sum(isinstance(order, kind) for order in self.group.orders) < count:
            assert time.monotonic() < deadline, (kind, self.group.orders)
            self.call.advance()
            time.sleep(0.01)


def test_who_asks_again_to_end_a_call_does_not_shorten_what_ranks_have_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accel.session.call._RELEASE_SECONDS", 60.0)
    recorded = RecordingCall()
    recorded.call.bring_back(0.0)
    recorded.advance_until(4)
    recorded.call.bring_back(0.0)
    recorded.call.advance()
    assert not recorded.killed


def test_ranks_that_are_killed_before_their_time_get_no_other_order() -> None:
    recorded = RecordingCall()
    recorded.end(0)
    recorded.call.bring_back(0.0)
    recorded.call.kill_unfinished()
    recorded.call.advance()
    recorded.call.bring_back(0.0)
    recorded.call.advance()
    assert recorded.killed == [1] and recorded.call.interrupted == {1} and not recorded.orders


def test_a_late_end_of_another_call_is_not_this_ones() -> None:
    recorded = RecordingCall()
    recorded.end(0, number=3)
    assert recorded.call.unfinished == {0, 1}
    recorded.end(0)
    assert recorded.call.unfinished == {1} and recorded.call.results.keys() == {0}


def test_after_a_failure_the_others_are_brought_back_more_and_more_firmly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("notebook_accel.session.call._RELEASE_SECONDS", 0.1)
    recorded = RecordingCall(grace=0.1)
    recorded.fail(0)
    recorded.call.advance()
    assert not recorded.orders
    recorded.advance_until(1)
    assert not recorded.call.was_released and recorded.call.interrupted == {1}
    recorded.advance_until(2)
    assert recorded.call.was_released
    assert [
        (order.rank, list(order.pids))
        for order in recorded.orders
        if isinstance(order, events.InterruptOrder)
    ] == [
        (1, []),
        (1, [100, 101]),
    ]
    recorded.advance_until(1, events.SignalOrder)
    assert recorded.killed == [1]
    failure = recorded.group.judge_end(Member(rank=1, pid=101), None, NOW)
    assert isinstance(failure, events.Failure) and failure.killer == "it did not come back and was killed"
    recorded.call.take(failure)
    error, notes = recorded.call.build_error(RunRecord(), "")
    assert isinstance(error, WorkerError) and error.rank == 0
    assert notes == ["rank 1 (process 101) was ended by SIGKILL: it did not come back and was killed"]


def test_a_rank_that_comes_back_in_time_is_left_alone() -> None:
    recorded = RecordingCall(grace=0.1)
    recorded.fail(0)
    recorded.call.advance()
    recorded.end(1)
    assert not recorded.orders and not recorded.call.unfinished and not recorded.call.interrupted


def test_a_stop_gives_all_ranks_the_same_question() -> None:
    recorded = RecordingCall()
    recorded.call.control.stop(60.0)
    recorded.call.advance()
    assert [type(order) for order in recorded.orders] == [events.HoldOrder, events.HoldOrder]
    recorded.call.take(events.Held(rank=0, time=NOW, questions=3))
    recorded.call.take(events.Held(rank=1, time=NOW, questions=5))
    recorded.advance_until(2, events.StopOrder)
    stops = [order for order in recorded.orders if isinstance(order, events.StopOrder)]
    assert [(order.rank, order.question) for order in sorted(stops, key=lambda order: order.rank)] == [
        (0, 6),
        (1, 6),
    ]


def test_a_stop_interrupts_ranks_that_do_not_ask() -> None:
    recorded = RecordingCall()
    recorded.call.control.stop(60.0)
    recorded.call.advance()
    for rank in (0, 1):
        recorded.call.take(events.Held(rank=rank, time=NOW, questions=0))
    recorded.advance_until(2)
    assert recorded.call.was_interrupted


def test_a_hang_of_a_call_is_told_with_the_ranks_that_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_watch, "_ANSWER_SECONDS", 60.0)
    group = RecordingGroup(3, hang_timeout=0.04)
    call = Call(number=4, name="f", ranks=frozenset({0, 1}), group=group)
    wait_until(lambda: call.advance() or group.orders)
    reports = [StackReport(rank=rank, time=NOW, collective="barrier", frames=()) for rank in range(2)]
    group.hang_watch.take(reports)
    call.advance()
    (notice,) = [event.text for event in group.shown if isinstance(event, events.Notice)]
    assert "ranks 0, 1 have entered barrier, rank 2 has not" in notice
    assert "rank 2 takes no part in the call" in notice
