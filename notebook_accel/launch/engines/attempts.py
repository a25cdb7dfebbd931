"""Engines whose workers form a `WorkerGroup`: what such an engine does for a run, from announcement to outcome."""

from __future__ import annotations

import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, Literal, TypeVar

from ... import interrupts
from ...errors import LaunchError
from ...events import Notice, Phase
from ...stream.record import RunRecord
from ..job import Job
from ..supervise.control import Control, StopAsked
from ..supervise.delivery import Deliver
from ..supervise.worker_group import Attempt, GroupState, WorkerGroup
from ..transfer import failures
from ..transfer.unpicklable import unpack_value
from .base import Engine, Outcome

INTERRUPT_GRACE: Final = 1.5
"""Seconds that workers have to end after an interrupt of the cell, before they are killed."""
STOP_GRACE: Final = 0.5
"""Seconds that workers have to end after SIGTERM, once a stop was asked for and their own time is over."""

PlanT = TypeVar("PlanT")
Wait = Callable[[str], None]
"""A waiting function calls it several times a second, with what it waits for; its exception ends the wait."""


class GroupEngine(Engine, Generic[PlanT]):
    """An engine that starts a `WorkerGroup` for each attempt.

    A subclass says what the workers need of this process (`plan`), and how a group of workers starts (`make_group`).
    This class does the rest of a run: it announces the launch, watches the workers, ends them, starts them again for
    `job.max_restarts`, and makes the outcome.

    `PlanT` is the type of the plan: what the engine takes from this process once, for all attempts.

    Attributes:
        first_attempt: number of the first attempt; more than 0 where the run goes on after restarts that others made.
    """

    first_attempt: int = 0

    @abstractmethod
    def plan(self, job: Job) -> AbstractContextManager[PlanT]:
        """Take from this process what the workers need: the pickled function, random states, lines of cells.

        After this the cell may go on, so nothing else of this process may be read later.

        Args:
            job: after preflight.

        Returns:
            A context that gives the plan. It ends with the run, after the last attempt.

        Raises:
            ShipError: on entering, the function or an argument cannot be pickled.
            LaunchError: on entering, the job cannot start.
        """

    @abstractmethod
    def make_group(self, plan: PlanT, attempt: Attempt) -> WorkerGroup[Any]:
        """Return the workers of an attempt, not started yet.

        Args:
            plan: what `plan` took from this process.
            attempt: the job and its ways to the run.
        """

    def describe_launch(self, job: Job, plan: PlanT) -> str:
        """Return what is launched, as a sentence for the cell.

        Args:
            job: what runs.
            plan: what `plan` took from this process.
        """
        count = job.local_world_size
        return f"Launching {job.name} on {count} {self.name} {'worker' if count == 1 else 'workers'}."

    def find_obstacle(self, job: Job, plan: PlanT, wait: Wait) -> str:
        """Return why the workers cannot start again, empty where they can.

        Args:
            job: what runs.
            plan: what `plan` took from this process.
            wait: called several times a second while it waits.
        """
        return ""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end, in as many attempts as it needs and may have.

        Args:
            job: after preflight.
            record: holds what was delivered.
            deliver: takes events as they come.
            control: says when to stop.

        Returns:
            How the run ended.

        Raises:
            LaunchError: the workers cannot start.
            KeyboardInterrupt: the cell was interrupted; all workers have ended.
        """
        group: WorkerGroup[Any] | None = None
        try:
            with self.plan(job) as plan:
                _say(deliver, "starting", "" if job.quiet else self.describe_launch(job, plan))
                hang = cause = ""
                for number in range(self.first_attempt, job.max_restarts + 1):
                    if group is not None:
                        obstacle = self.find_obstacle(job, plan, _make_wait(deliver, control))
                        cause = describe_cause(record, hang)
                        if not _announce_restart(job, deliver, number, cause, obstacle):
                            break
                    attempt = Attempt(job=job, record=record, deliver=deliver, control=control, number=number)
                    group = self.make_group(plan, attempt)
                    try:
                        state = run_attempt(group)
                    except LaunchError as error:
                        if cause:
                            failures.add_note(error, f"before this, {cause}")
                        raise
                    hang = group.hang
                    if state not in ("failed", "hung"):
                        break
        except StopAsked:  # while it waited for another attempt: how the last one failed is what is told
            if group is None:
                raise
            return make_outcome(record, group.stopped_ranks, hang=hang, was_stopped=True)
        assert group is not None
        return make_outcome(record, group.stopped_ranks, hang=hang, was_stopped=state == "stopped")


def _make_wait(deliver: Deliver, control: Control) -> Wait:
    """Return what a wait between two attempts calls: it shows its text, and raises where the run is to stop."""
    shown = ""

    def wait(text: str) -> None:
        nonlocal shown
        if text and text != shown:
            shown = text
            _say(deliver, "starting", "")
            _tell(deliver, text)
        deliver([])
        control.check()

    return wait


def _announce_restart(job: Job, deliver: Deliver, number: int, cause: str, obstacle: str) -> bool:
    """Say that the workers start again and why, or why they cannot; return whether they can."""
    if obstacle:
        _tell(deliver, f"no restart {number} of {job.max_restarts}: {obstacle}")
    else:
        _say(deliver, "restarting", f"{cause}; restart {number} of {job.max_restarts}")
    return not obstacle


def run_attempt(group: WorkerGroup[Any]) -> GroupState:
    """Start the workers of an attempt, and return how it ended, once all of them have.

    Args:
        group: the workers, not started yet; it is closed afterwards.

    Raises:
        LaunchError: the workers cannot start.
        KeyboardInterrupt: the cell was interrupted; all workers have ended.
    """
    state: GroupState = "stopped"
    try:
        group.start()
        state = group.watch()
        if state in ("failed", "hung"):
            group.settle()
        elif state == "stopped":
            group.hear_last_lines()
            group.stop(STOP_GRACE, signal.SIGTERM)
    except StopAsked:
        pass
    finally:
        with interrupts.delay_interrupt():
            group.stop(INTERRUPT_GRACE)
            group.close()
    return state


def describe_cause(record: RunRecord, hang: str) -> str:
    """Return in a line why an attempt ended badly.

    Args:
        record: has the failures of the attempt.
        hang: the report of the hang that ended it, else empty.
    """
    if hang or not record.failures:
        return hang.partition("\n")[0]
    return failures.describe_failure(failures.find_first(record.failures))


def make_outcome(
    record: RunRecord, stopped_ranks: Collection[int], *, hang: str = "", was_stopped: bool = False
) -> Outcome:
    """Return how a run ended, by what its last attempt left.

    Args:
        record: has the results or failures of the last attempt.
        stopped_ranks: ranks that the launcher ended.
        hang: the report of the hang that ended the run, else empty.
        was_stopped: whether somebody asked for the end, and workers were ended for it.

    Raises:
        ShipError: a value cannot be made again from its pickle.
    """
    stopped = frozenset(stopped_ranks)
    if hang:  # what failed after that did so because ranks were ended
        return Outcome(stopped=stopped, hang=hang)
    if record.failures:
        return Outcome(failures=tuple(record.failures), stopped=stopped)
    values = {rank: unpack_value(result) for rank, result in record.results.items()}
    return Outcome(values=values, stopped=stopped, was_stopped=was_stopped)


def _say(deliver: Deliver, name: Literal["starting", "restarting"], text: str) -> None:
    deliver([Phase(rank=-1, time=time.time(), name=name, detail=text)])


def _tell(deliver: Deliver, text: str) -> None:
    deliver([Notice(rank=-1, time=time.time(), text=text)])
