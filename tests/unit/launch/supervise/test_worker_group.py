"""What all worker groups have in common, tried on workers that are told what to say."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from notebook_accel.events import (
    Ended,
    Event,
    Failure,
    Held,
    HoldOrder,
    Order,
    Phase,
    RaisedError,
    Result,
    Save,
    SignalOrder,
    StackOrder,
    StackReport,
    StopOrder,
    WriteOrder,
)
from notebook_accel.launch.supervise import worker_group
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.worker_group import Attempt, Member, WorkerGroup
from notebook_accel.launch.transfer.failures import make_exit_error
from notebook_accel.stream.record import RunRecord
from tests.unit.clock import Clock
from tests.unit.jobs import make_job

Answer = Callable[[Order], Sequence[Event]]


class ScriptedGroup(WorkerGroup[Member]):
    """Two ranks that say what a test wants, and answer orders as it wants; a signal that kills ends a rank."""

    kill_seconds = 60.0

    def __init__(self, answer: Answer = lambda order: (), **options: object) -> None:
        self.record, self.control = RunRecord(), Control()
        self.orders: list[Order] = []
        self._answer = answer
        self._coming: list[Event] = []
        self._silent: set[int] = set()
        job = make_job(local_world_size=2, **options)
        super().__init__(Attempt(job=job, record=self.record, deliver=self._apply, control=self.control))

    def _apply(self, events: Sequence[Event]) -> None:
        for event in events:
            self.record.apply(event)

    def start(self) -> None:
        self._members = [Member(rank=rank, pid=100 + rank) for rank in range(2)]
        self.say(*(Phase(rank=rank, time=time.time(), name="running") for rank in range(2)))

    def say(self, *events: Event) -> None:
        self._coming += events

    def cut_off(self, rank: int) -> None:
        self._silent.add(rank)

    def tell(self, order: Order) -> None:
        self.orders.append(order)
        self.say(*self._answer(order))
        if isinstance(order, SignalOrder) and order.signum == signal.SIGKILL:
            self.say(ended(order.rank, -9))

    def receive(self, timeout: float) -> Sequence[Event]:
        if not self._coming:
            time.sleep(min(timeout, 0.005))
        events, self._coming = self._coming, []
        return events

    def note_ends(self) -> None:
        for member in self.list_running():
            if member.rank in self._silent:
                self.lose(member, lambda lost: f"rank {lost.rank} is cut off")

    def close(self) -> None:
        self._members.clear()

    @property
    def signals_sent(self) -> list[tuple[int, int]]:
        return [(order.rank, order.signum) for order in self.orders if isinstance(order, SignalOrder)]


def ended(rank: int, exitcode: int = 0) -> Ended:
    return Ended(rank=rank, time=time.time(), pid=100 + rank, exitcode=exitcode)


def result(rank: int) -> Result:
    return Result(rank=rank, time=time.time(), value=b"")


def failure(rank: int) -> Failure:
    error = RaisedError(type_name="ValueError", message="no", pickled=None, frames=())
    return Failure(rank=rank, time=time.time(), pid=100 + rank, error=error)


def saving(rank: int, *, is_over: bool = False) -> Save:
    return Save(rank=rank, time=time.time(), name="/kept", folders=(), is_over=is_over)


@pytest.fixture
def group() -> ScriptedGroup:
    group = ScriptedGroup()
    group.start()
    return group


def test_an_attempt_is_done_once_all_have_ended(group: ScriptedGroup) -> None:
    group.say(result(0), ended(0), result(1))
    assert group.watch(0.02) == "running" and group.pids == {0: 100, 1: 101}
    assert [member.rank for member in group.list_running()] == [1]
    group.say(ended(1))
    assert group.watch() == "done" and not group.record.failures and not group.stopped_ranks


def test_who_ends_without_a_word_has_failed(group: ScriptedGroup) -> None:
    group.say(result(0), ended(0), ended(1, -9))
    assert group.watch() == "failed"
    (found,) = group.record.failures
    assert (found.rank, found.pid, found.exitcode, found.error) == (1, 101, -9, None)


def test_an_end_knows_when_the_worker_was_alive(group: ScriptedGroup) -> None:
    group._members[1].alive = 17.0
    group.say(ended(1, -9))
    assert group.watch() == "failed" and group.record.failures[0].alive == 17.0


def test_after_a_failure_the_others_are_ended(group: ScriptedGroup) -> None:
    group.say(failure(0), ended(0, 1))
    assert group.watch() == "failed"
    group.settle()
    assert isinstance(group.orders[0], WriteOrder) and group.orders[0].rank == 1, (
        "what it has printed is kept"
    )
    assert group.signals_sent == [(1, signal.SIGTERM), (1, signal.SIGKILL)]
    assert group.stopped_ranks == {1} and not group.is_running
    assert [each.rank for each in group.record.failures] == [0], "the one that was ended has not failed"


def test_workers_write_out_before_they_are_stopped(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "_LAST_WORDS_SECONDS", 60.0)
    monkeypatch.setattr(group, "_answer", lambda order: [result(order.rank), ended(order.rank)])
    group.hear_last_lines()
    assert [(type(order), order.rank) for order in group.orders] == [(WriteOrder, 0), (WriteOrder, 1)]
    assert not group.is_running and not group.record.failures


def test_who_lost_a_peer_is_no_cause_while_the_peers_own_end_may_come(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system closes the connections of a process before it says that the process has ended."""
    monkeypatch.setattr(worker_group, "_SETTLE_SECONDS", 3600.0)
    receive, looks = group.receive, itertools.count()

    def receive_late(timeout: float) -> Sequence[Event]:
        if next(looks) == 100:
            group.say(ended(1, -9))
        return receive(timeout)

    monkeypatch.setattr(group, "receive", receive_late)
    raised = RaisedError(
        type_name="RuntimeError", message="Connection closed by peer", pickled=None, frames=()
    )
    group.say(replace(failure(0), error=raised), ended(0, 1))
    assert group.watch() == "failed"
    group.settle()
    assert [each.rank for each in group.record.failures] == [0, 1] and not group.stopped_ranks


def test_after_a_failure_a_checkpoint_is_finished_first(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "SAVE_SECONDS", 3600.0)
    monkeypatch.setattr(worker_group, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(worker_group, "_SETTLE_SECONDS", 60.0)
    receive, looks = group.receive, itertools.count()
    steps = {
        100: [saving(1)],  # it was late
        150: [saving(0, is_over=True)],
        200: [saving(1, is_over=True)],
        250: [ended(0, 1)],
    }

    def receive_late(timeout: float) -> Sequence[Event]:
        assert not group.signals_sent or not steps, "it is ended too early"
        group.say(*steps.pop(next(looks), ()))
        return receive(timeout)

    group.say(saving(0), failure(0))
    assert group.watch() == "failed"
    monkeypatch.setattr(group, "receive", receive_late)
    monkeypatch.setattr(
        group, "_answer", lambda order: [ended(order.rank, -15)] if isinstance(order, SignalOrder) else []
    )
    group.settle()
    assert group.signals_sent == [(1, signal.SIGTERM)]
    assert group.record.notice == "checkpoint /kept is still being saved in the background: that has 3600 s"


@pytest.mark.parametrize("because", ["interrupt", "stop", "time", "loss"])
def test_a_checkpoint_that_cannot_be_finished_is_dropped(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch, because: str
) -> None:
    monkeypatch.setattr(worker_group, "SAVE_SECONDS", 0.0 if because == "time" else 3600.0)
    monkeypatch.setattr(worker_group, "_SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(worker_group.interrupts, "take_interrupt", lambda: because == "interrupt")
    group.say(saving(0), saving(1), failure(0))
    if because == "loss":
        group.say(ended(0, 1))
    assert group.watch() == "failed"
    if because == "stop":
        group.control.stop(0.0)
    group.settle()
    assert not group.is_running and group.record.notice.startswith("checkpoint /kept was still being saved")
    assert all(save.is_over for save in group.record.saves.values())


def test_who_ends_after_the_signal_is_not_killed() -> None:
    group = ScriptedGroup(lambda order: [ended(order.rank, -2)] if isinstance(order, SignalOrder) else [])
    group.start()
    group.stop(60.0)
    assert group.signals_sent == [(0, signal.SIGINT), (1, signal.SIGINT)]
    assert group.stopped_ranks == {0, 1} and not group.record.failures


def test_without_grace_workers_are_killed_at_once(group: ScriptedGroup) -> None:
    group.stop(0.0)
    assert group.signals_sent == [(0, signal.SIGKILL), (1, signal.SIGKILL)] and not group.is_running


@pytest.mark.parametrize("exitcode", [-9, None])
def test_a_worker_that_is_killed_alone_fails_for_the_cause_that_is_given(
    group: ScriptedGroup, exitcode: int | None
) -> None:
    group.kill(1, "it was in the way")
    group.receive(0.0)
    group.note_end(group.list_running()[1], exitcode, time.time())
    assert [member.rank for member in group.list_running()] == [0]
    (found,) = group.record.failures
    assert str(make_exit_error(found)) == "rank 1 (process 101) was ended by SIGKILL: it was in the way"


@pytest.mark.parametrize(("saves", "seconds"), [(False, 3), (True, 13)])
def test_who_leaves_has_time_for_a_checkpoint(
    group: ScriptedGroup, monkeypatch: pytest.MonkeyPatch, saves: bool, seconds: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(worker_group, "time", clock)
    began = clock.now

    def receive(timeout: float) -> Sequence[Event]:
        clock.now += 1
        return [saving(rank, is_over=True) for rank in range(2)] if saves and clock.now == began + 11 else []

    if saves:
        group.say(saving(0), saving(1))
        group.poll(0.0)
    monkeypatch.setattr(group, "receive", receive)
    group.wait_for_leaving(3.0)
    assert clock.now - began == seconds and group.is_running and not group.signals_sent


def test_a_lost_worker_ends_the_others_and_says_what_became_of_it(group: ScriptedGroup) -> None:
    group.cut_off(1)
    assert group.watch() == "failed"
    assert [(each.rank, each.lost) for each in group.record.failures] == [(1, "rank 1 is cut off")]
    assert group.signals_sent == [(0, signal.SIGTERM), (0, signal.SIGKILL)] and group.stopped_ranks == {0}


def test_who_is_lost_while_it_is_ended_is_no_failure(group: ScriptedGroup) -> None:
    group.cut_off(0)
    group.cut_off(1)
    group.stop(1.0)
    assert not group.is_running and not group.record.failures


def test_ranks_stop_at_one_question() -> None:
    def answer(order: Order) -> Sequence[Event]:
        if isinstance(order, HoldOrder):
            return [Held(rank=order.rank, time=order.time, questions=3 + order.rank)]
        return [result(order.rank), ended(order.rank)] if isinstance(order, StopOrder) else []

    group = ScriptedGroup(answer)
    group.start()
    group.control.stop(60.0)
    assert group.watch() == "done"
    assert {order.question for order in group.orders if isinstance(order, StopOrder)} == {5}


def test_ranks_that_never_ask_are_to_be_ended(group: ScriptedGroup) -> None:
    group.control.stop(0.05)
    assert group.watch() == "stopped"


@pytest.mark.parametrize("on_hang", ["tell", "raise"])
def test_a_hang_is_reported_and_ends_the_run_where_it_shall(on_hang: str) -> None:
    def answer(order: Order) -> Sequence[Event]:
        if not isinstance(order, StackOrder):
            return []
        return [StackReport(rank=order.rank, time=order.time, collective="barrier", frames=())]

    group = ScriptedGroup(answer, hang_timeout=0.05, on_hang=on_hang)
    group.start()
    while (state := group.watch(0.5)) == "running" and not group.record.notice:
        pass  # this process stood still
    assert state == ("hung" if on_hang == "raise" else "running")
    assert "nothing was heard of ranks 0, 1" in group.record.notice
    assert group.hang == (group.record.notice if on_hang == "raise" else "")
    assert sum(isinstance(order, StackOrder) for order in group.orders) == 2


def test_the_end_of_a_process_is_no_news() -> None:
    """Else a hang would be reported once more when the rank that returned first ends."""
    group = ScriptedGroup(hang_timeout=60.0)
    group.start()
    group.poll(0.0)
    before = group.hang_watch.news
    group.say(ended(0))
    group.poll(0.0)
    assert group.hang_watch.news == before


def test_a_worker_that_ends_before_its_function_is_named_by_its_process(group: ScriptedGroup) -> None:
    """Under Ray the notebook learns a process id when the function begins, or when the process has ended."""
    group.list_running()[1].pid = 0
    group.say(ended(1, -9))
    assert group.watch() == "failed"
    assert [(each.rank, each.pid) for each in group.record.failures] == [(1, 101)]
