"""What is told of a rank that a signal has ended, on a node of a job; with a cluster it is tried in tests/nodes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.remote.hosts_group import HostMember
from notebook_accel.launch.engines.slurm.command import JobState
from notebook_accel.launch.engines.slurm.engine import SlurmWorkerGroup
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.delivery import Delivery
from notebook_accel.launch.transfer import failures
from notebook_accel.stream.record import RunRecord
from tests.unit.jobs import make_job


class FakeAllocation:
    """A job of SLURM whose state is known: first how it is while it ends, then how it has ended."""

    def __init__(self, *states: str) -> None:
        self._states = list(states)
        self.looks = 0
        self.is_preempted = False
        self.state = JobState(job_id="7", state="RUNNING")

    def look(self, check: Callable[[], None]) -> JobState:
        self.looks += 1
        return self.look_at_end(lambda text: None, 0.0)

    def look_at_end(self, wait: Callable[[str], None], seconds: float) -> JobState:
        if not self._states:
            raise LaunchError("slurm_load_jobs error: Unable to contact slurm controller")
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        self.state = JobState(job_id="7", state=state)
        return self.state

    def describe_loss(self) -> str:
        return self.state.describe_loss(is_preempted=self.is_preempted)


class FakeLink:
    """A connection to an agent that has not ended."""

    host = node = "n1"
    facts, lost, client = MappingProxyType[str, str]({}), "", SimpleNamespace(host_noun="node")

    def __init__(self, *said: str) -> None:
        self.said = said


def make_group(allocation: FakeAllocation | None, count: int, *said: str) -> Any:
    """Return a group of ranks on a node `n1` that have begun, none of which can be told anything."""
    group: Any = SlurmWorkerGroup.__new__(SlurmWorkerGroup)
    group._job, group._record, group._control = make_job(os.getpid), RunRecord(), Control()
    group._delivery = Delivery(group._record.apply_all, group._record)
    group._lender = SimpleNamespace(allocation=allocation)
    group.stopped_ranks, group.killed, group.tell = set(), {}, lambda order: None
    link: Any = FakeLink(*said)
    group._links = [link]
    group._ranks, group._machine = {link: range(count)}, "here"
    group._link_of = dict.fromkeys(range(count), link)
    group._places = group._place_ranks()
    group._members = [HostMember(rank=rank, link=link, pid=70 + rank) for rank in range(count)]
    group.stop = lambda grace, signum: None
    return group


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(
    ("state", "how"),
    [("CANCELLED", "was cancelled from outside while its ranks ran"), ("TIMEOUT", "has ended: TIMEOUT")],
)
def test_a_rank_that_ends_before_its_agent_is_lost_with_its_job(signum: int, state: str, how: str) -> None:
    allocation = FakeAllocation("COMPLETING", state)
    group = make_group(allocation, 2)
    group.note_end(group._members[0], -signum, 1.0)
    told = [failures.describe_failure(failure) for failure in group._record.failures]
    name = signal.Signals(signum).name
    assert told == [
        f"rank 0 (on n1, process 70) is lost: node n1: its process was ended by {name}; job 7 {how}"
    ]
    group.note_end(group._members[1], -signum, 1.1)
    assert allocation.looks == 1, "SLURM is asked for the first one alone"


def test_a_rank_of_a_job_that_was_queued_again_says_why() -> None:
    """SLURM forgets a preemption where it queues the job again; what it has told the steps is still there."""
    said = "slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-28T07:58:04 DUE TO PREEMPTION ***"
    group = make_group(FakeAllocation("COMPLETING", "PENDING"), 1, said)
    group.note_end(group._members[0], -signal.SIGTERM, 1.0)
    (told,) = [failures.describe_failure(failure) for failure in group._record.failures]
    assert told.endswith("job 7 was preempted: another job got its nodes, and is queued again: PENDING"), told


@pytest.mark.parametrize("allocation", [None, FakeAllocation(), FakeAllocation("RUNNING")])
def test_a_rank_of_a_job_that_goes_on_was_ended_by_somebody_else(allocation: FakeAllocation | None) -> None:
    group = make_group(allocation, 1)
    group.note_end(group._members[0], -signal.SIGTERM, 1.0)
    (failure,) = group._record.failures
    assert "was ended by SIGTERM: something outside the launch" in failures.describe_failure(failure)


def test_slurm_is_not_asked_for_an_end_of_another_kind() -> None:
    allocation = FakeAllocation("CANCELLED")
    group = make_group(allocation, 1)
    group.note_end(group._members[0], 3, 1.0)
    assert not allocation.looks and group._record.failures[0].exitcode == 3
