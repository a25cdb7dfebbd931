"""In the notebook: one call of a session, from its orders to its end on every rank."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import RunStoppedError
from ..events import CallEnd, Event, Failure, Held, InterruptOrder, Result, StackReport
from ..launch.durations import Start
from ..launch.engines.base import Outcome
from ..launch.rank_names import name_process
from ..launch.run_errors import build_error
from ..launch.supervise import hang_report
from ..launch.supervise.control import Control
from ..launch.supervise.stop_agreement import StopAgreement
from ..launch.supervise.worker_group import WorkerGroup
from ..launch.transfer import failures
from ..stream.record import RunRecord

_INTERRUPT_SECONDS: Final = 0.3  # from the interrupt to the end of connections; enough for Python code
_RELEASE_SECONDS: Final = 15.0  # a rank that is killed takes the session's state along


@dataclass(kw_only=True)
class Call:
    """The state of one call.

    The thread that reads events calls `take` and `advance`. Others ask for the end, and show what waits.

    Attributes:
        number: counted from 1; answers to earlier calls have another number.
        name: for messages.
        ranks: that take part.
        group: all workers of the session.
        grace: seconds that ranks have to end after one has failed.
        results: of ranks that have returned.
        failures: of ranks that have raised or died.
        collectives: how many the call began on each rank, by process group; None for a rank that has left its group.
        waiting: events to be shown.
        control: asks the ranks to stop.
        interrupted: ranks that had to be interrupted.
        was_interrupted: True if somebody asked for the end and ranks had to be interrupted for it.
        was_released: True if connections between ranks had to be closed.
        start: when it started.
    """

    number: int
    name: str
    ranks: frozenset[int]
    group: WorkerGroup[Any]
    grace: float = 1.0
    results: dict[int, Result] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    collectives: dict[int, Mapping[str, int] | None] = field(default_factory=dict)
    waiting: deque[Event] = field(default_factory=deque)
    control: Control = field(default_factory=Control)
    interrupted: set[int] = field(default_factory=set)
    was_interrupted: bool = False
    was_released: bool = False
    start: Start = field(default_factory=Start)

    def __post_init__(self) -> None:
        self._held: dict[int, int] = {}
        self._agreement = StopAgreement(self.group.tell, self._held, self.control)
        self.group.hang_watch.begin()
        # when ranks that have not ended are interrupted, released or killed, by the monotonic clock
        self._next = math.inf

    @property
    def unfinished(self) -> frozenset[int]:
        """The ranks that have not ended the call."""
        return self.ranks - self.results.keys() - self.failures.keys()

    def take(self, event: Event) -> None:
        """Take an event of a worker; those to be shown go to `waiting`."""
        if isinstance(event, CallEnd):
            if event.call != self.number:
                return
            if isinstance(event.outcome, Result):
                self.results[event.rank] = event.outcome
            else:
                self.failures[event.rank] = event.outcome
            self.collectives[event.rank] = event.collectives
        elif isinstance(event, Failure):
            if event.rank in self.ranks:
                self.failures.setdefault(event.rank, event)
        elif isinstance(event, Held):
            self._held[event.rank] = event.questions
        elif not isinstance(event, StackReport):  # which the group's hang watch has taken
            self.waiting.append(event)

    def advance(self) -> None:
        """Do what is due now; comes several times a second."""
        unfinished = self.unfinished
        if not unfinished:
            return
        if self.failures:
            self.bring_back(self.grace)
        if self._agreement.is_due(unfinished):
            self.was_interrupted = True
            self.bring_back(0.0)
        if time.monotonic() >= self._next:
            self._interrupt(unfinished)
        elif not self.interrupted:
            pids = self.group.pids
            running = {rank: pids[rank] for rank in unfinished}
            absent = pids.keys() - self.ranks
            self.group.hang_watch.look(running, unfinished, self.ranks - unfinished, absent)

    def bring_back(self, grace: float) -> None:
        """End the call on the ranks that have not ended it.

        Args:
            grace: seconds that they have to end by themselves. Then they are interrupted, released and killed in turn,
                each after its time, whoever asks again.
        """
        if not self.interrupted:
            self._next = min(self._next, time.monotonic() + grace)

    def kill_unfinished(self) -> None:
        """Kill the ranks that have not ended the call: whoever waits for them waits no longer."""
        self.interrupted |= self.unfinished
        for rank in self.unfinished:
            self.group.kill(rank, "it did not come back and was killed")
        self._next = math.inf

    def _interrupt(self, unfinished: frozenset[int]) -> None:
        """Make ranks come back, each time by a stronger means."""
        if self.was_released:
            self.kill_unfinished()
            return
        self.was_released = bool(self.interrupted)
        self.interrupted |= unfinished
        pids = list(self.group.pids.values()) if self.was_released else []
        for rank in unfinished:
            self.group.tell(
                InterruptOrder(
                    rank=rank, time=time.time(), call=self.number, pids=pids, addresses=self.group.addresses
                )
            )
        self._next = time.monotonic() + (_RELEASE_SECONDS if self.was_released else _INTERRUPT_SECONDS)

    # -- how it ended

    def build_error(self, record: RunRecord, future: str) -> tuple[BaseException, list[str]]:
        """Return the exception of the rank that failed first, and one line for each rank, which are its notes.

        Args:
            record: of the session.
            future: says whether there will be another call, as a clause.
        """
        own = [failure for failure in self.failures.values() if self._is_own(failure)]
        stopped = {rank: _describe_stopped(end) for rank, end in self.failures.items() if end not in own}
        if own:
            outcome = Outcome(failures=own, stopped=frozenset(stopped))
            return build_error(outcome, record, self.name, self.start, stopped)
        error = RunStoppedError(f"{self.name} was stopped, {future}")
        for note in stopped.values():
            failures.add_note(error, note)
        return error, [*stopped.values()]

    def _is_own(self, failure: Failure) -> bool:
        """Return whether a rank failed by itself, and was not made to end.

        One that had died did so by itself: an interrupt may go before the news comes. In a call that the user stopped
        the interrupt came first.
        """
        if failure.rank not in self.interrupted:
            return True
        return failure.error is None and failure.rank not in self.group.killed and not self.was_interrupted


def _describe_stopped(failure: Failure) -> str:
    """Return a line about a rank that was interrupted: where it was, or how it ended."""
    if failure.error is None:
        return failures.describe_failure(failure)
    frame = hang_report.find_users_frame(failure.error.frames)
    place = f" in {hang_report.describe_frame(frame)}" if frame is not None else ""
    return f"{name_process(failure.rank, failure.pid, failure.node)} was stopped{place}"
