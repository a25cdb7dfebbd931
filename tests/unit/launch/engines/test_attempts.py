"""Whole engines in a few lines: what `GroupEngine` does for them in a run."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from torch.distributed import TCPStore

from notebook_accel import notebook_launcher
from notebook_accel.errors import LaunchError
from notebook_accel.events import Ended, Event, Notice, Order, Phase, Result
from notebook_accel.launch.agent.parent_state import ParentState
from notebook_accel.launch.engines import stores
from notebook_accel.launch.engines.attempts import GroupEngine, Wait
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.job import Job
from notebook_accel.launch.supervise.control import Control, StopAsked
from notebook_accel.launch.supervise.local_group import LocalWorkerGroup
from notebook_accel.launch.supervise.worker_group import Attempt, Member, WorkerGroup
from notebook_accel.launch.transfer.shared_memory import SharedPickle
from notebook_accel.launch.transfer.unpicklable import pack_job
from notebook_accel.launch.worker import environment
from notebook_accel.stream.record import RunRecord
from notebook_accel.topology import Topology
from tests.unit.jobs import make_job


class QueueGroup(WorkerGroup[Member]):
    """One worker, which ends with each attempt's exit code."""

    def __init__(self, attempt: Attempt, plan: list[Any]) -> None:
        super().__init__(attempt)
        self._exitcode = plan[attempt.number]
        self._closed = plan

    def start(self) -> None:
        if isinstance(self._exitcode, BaseException):
            raise self._exitcode
        self._members = [Member(rank=0, pid=7)]

    def tell(self, order: Order) -> None: ...

    def receive(self, timeout: float) -> Sequence[Event]:
        now = time.time()
        value = [Result(rank=0, time=now, value=pickle.dumps("value"))] if self._exitcode == 0 else []
        return [*value, Ended(rank=0, time=now, pid=7, exitcode=self._exitcode)]

    def note_ends(self) -> None: ...

    def close(self) -> None:
        self._closed.append("closed")


class QueueEngine(GroupEngine[list[Any]]):
    """Plans a list with the exit code, or the error, of each attempt."""

    name = "queue"
    obstacle = ""

    def __init__(self, *attempts: Any) -> None:
        self.attempts = list(attempts)
        self.plans: list[str] = []

    @contextlib.contextmanager
    def plan(self, job: Job) -> Iterator[list[Any]]:
        self.plans.append("opened")
        try:
            yield self.attempts
        finally:
            self.plans.append("closed")

    def make_group(self, plan: list[Any], attempt: Attempt) -> QueueGroup:
        return QueueGroup(attempt, plan)

    def find_obstacle(self, job: Job, plan: list[Any], wait: Wait) -> str:
        return self.obstacle


class Launch:
    """A run of an engine, and what it said."""

    def __init__(self) -> None:
        self.record, self.control = RunRecord(), Control()
        self.said: list[tuple[str, str]] = []
        self.notices: list[str] = []

    def run(self, engine: QueueEngine, **options: Any) -> Outcome:
        job = make_job(name="train", distributed=True, **options)
        return engine.run(job, self.record, self._deliver, self.control)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self.record.apply(event)
            if isinstance(event, Phase):
                self.said.append((event.name, event.detail))
            elif isinstance(event, Notice):
                self.notices.append(event.text)


def test_an_engine_is_a_plan_and_a_group() -> None:
    launch, engine = Launch(), QueueEngine(0)
    outcome = launch.run(engine)
    assert outcome.values == {0: "value"} and not outcome.is_bad
    assert launch.said == [("starting", "Launching train on 1 queue worker.")]
    assert engine.plans == ["opened", "closed"] and engine.attempts.count("closed") == 1


def test_workers_start_again_as_often_as_they_may() -> None:
    launch = Launch()
    outcome = launch.run(QueueEngine(3, -9, 0), max_restarts=2, quiet=True)
    assert outcome.values == {0: "value"}
    again = [text for name, text in launch.said if name == "restarting"]
    assert again[0].endswith("left with exit code 3 before its function returned; restart 1 of 2")
    assert again[1].endswith("; restart 2 of 2") and "SIGKILL" in again[1]
    outcome = Launch().run(QueueEngine(3, 4), max_restarts=1)
    assert [failure.exitcode for failure in outcome.failures] == [4], "those of the last attempt"


def test_an_obstacle_is_named_and_ends_the_run() -> None:
    launch, engine = Launch(), QueueEngine(3, 0)
    engine.obstacle = "too few nodes are left"
    outcome = launch.run(engine, max_restarts=1)
    assert launch.notices == ["no restart 1 of 1: too few nodes are left"]
    assert [failure.exitcode for failure in outcome.failures] == [3]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="notes came with Python 3.11")
def test_a_restart_that_cannot_begin_says_what_came_before() -> None:
    with pytest.raises(LaunchError, match="no room") as raised:
        Launch().run(QueueEngine(3, LaunchError("no room")), max_restarts=1)
    (note,) = raised.value.__notes__
    assert note.startswith("before this, rank 0 (process ") and "left with exit code 3" in note


def test_a_stop_while_another_attempt_is_waited_for_ends_the_run() -> None:
    launch = Launch()

    class Patient(QueueEngine):
        is_stopped = False

        @contextlib.contextmanager
        def plan(self, job: Job) -> Iterator[list[Any]]:
            try:
                yield self.attempts
            except StopAsked:
                self.is_stopped = True
                raise

        def find_obstacle(self, job: Job, plan: list[Any], wait: Wait) -> str:
            wait("for a host")
            launch.control.stop(0.0)
            wait("for a host")
            raise AssertionError("it waits no more")

    engine = Patient(3, 0)
    outcome = launch.run(engine, max_restarts=1)
    assert [failure.exitcode for failure in outcome.failures] == [3]
    assert engine.is_stopped and launch.notices == ["for a host"]


def test_attempts_that_others_made_count() -> None:
    launch, engine = Launch(), QueueEngine(0, 0, 3, 0)
    engine.first_attempt = 2
    assert [failure.exitcode for failure in launch.run(engine, max_restarts=2).failures] == [3]
    assert not any(name == "restarting" for name, _ in launch.said)


def test_a_stop_during_the_start_is_no_error() -> None:
    outcome = Launch().run(QueueEngine(StopAsked()), max_restarts=1)
    assert outcome.was_stopped and not outcome.failures


@pytest.mark.parametrize("error", [LaunchError("no room"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_start_raises_passes_through_a_closed_group(error: BaseException) -> None:
    engine = QueueEngine(error)
    with pytest.raises(type(error)):
        Launch().run(engine)
    assert engine.attempts[-1] == "closed" and engine.plans == ["opened", "closed"]


class HereEngine(GroupEngine[tuple[SharedPickle, ParentState]]):
    """Starts real workers on this machine."""

    name = "here"
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "it starts workers on this machine only",
        "address": "it starts workers on this machine, by itself",
        "tpu_mode": "its workers use no TPU",
    }
    store: TCPStore | None = None

    @contextlib.contextmanager
    def plan(self, job: Job) -> Iterator[tuple[SharedPickle, ParentState]]:
        pickled = pack_job(job.function, job.args, job.name)
        with contextlib.closing(SharedPickle(pickled)) as payload:
            yield payload, ParentState.capture(job)
            self.store = None

    def make_group(self, plan: tuple[SharedPickle, ParentState], attempt: Attempt) -> LocalWorkerGroup:
        job, (payload, state) = attempt.job, plan
        count, address = job.local_world_size, job.rendezvous.address
        self.store = stores.open_store(job.rendezvous)
        environments = {}
        for rank in range(count):
            place = Topology(rank=rank, local_rank=rank, world_size=count, local_world_size=count)
            variables = environment.list_rank_variables(
                place, job, address=address, port=self.store.port, attempt=attempt.number
            )
            environments[rank] = environment.make_environment(job, state.variables, variables, is_alone=True)
        return LocalWorkerGroup(attempt, payload=payload, environments=environments, parent_state=state)


@pytest.mark.parametrize("argument", HereEngine.refuses)
def test_an_engine_says_what_it_refuses(argument: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "num_nodes": {"num_nodes": 2, "use_port": 1},  # nothing listens
        "address": {"address": "somewhere"},
        "tpu_mode": {"tpu_mode": "spmd"},
    }
    with pytest.raises(ValueError, match=f"with engine='here': {HereEngine.refuses[argument]}"):
        notebook_launcher(print, num_processes=2, engine=HereEngine(), **given[argument])


def _return_rank(scale: int) -> int:
    rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print("this is rank", rank)
    if rank == 1 and not restarts:
        raise ValueError("the first attempt fails")
    return rank * scale


def test_an_engine_of_one_file_launches_workers(capsys: pytest.CaptureFixture[str]) -> None:
    values = notebook_launcher(
        _return_rank,
        (10,),
        num_processes=2,
        engine=HereEngine(),
        start_method="fresh",
        max_restarts=1,
        returns="all",
        environment={"ACCELERATE_USE_CPU": "true"},
    )
    assert values == [0, 10]
    shown = "".join(capsys.readouterr())
    assert "Launching _return_rank on 2 here workers." in shown
    assert "[0] this is rank 0" in shown and shown.count("[1] this is rank 1") == 2
    assert "raised ValueError: the first attempt fails; restart 1 of 1" in shown
