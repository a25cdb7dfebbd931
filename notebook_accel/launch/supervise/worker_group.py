"""The workers of one attempt, however they are started: watched, asked to stop, ended."""

from __future__ import annotations

import math
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Generic, Literal, TypeVar

from ... import interrupts
from ...events import Ended, Event, Failure, Notice, Order, SignalOrder, WriteOrder
from ...stream.record import RunRecord
from .. import signals
from ..job import Job
from ..transfer import failures
from .control import Control
from .delivery import Deliver, Delivery
from .hang_watch import HangWatch
from .stop_agreement import ShareStop, StopAgreement, share_with_nobody

GroupState = Literal["running", "done", "failed", "stopped", "hung", "again"]
"""How an attempt stands; workers of one that is `stopped`, `hung`, or called `again` by other nodes are to be ended."""

SAVE_SECONDS: Final = 30.0
"""How long a checkpoint that is being written in the background is waited for, after a failure for example."""
_LOOK_SECONDS: Final = 0.1
_HANG_LOOK_SECONDS: Final = 0.1  # between two looks, each of which is at all ranks
_END_LOOK_SECONDS: Final = 0.02  # between two looks at workers that are being ended
_LEAST_KILL_SECONDS: Final = 2.0  # that killed workers have also where the user interrupts the wait for them
_LAST_WORDS_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 1.0
_TELL_SECONDS: Final = 1.0  # that this may take before it is told
_PEER_END_SECONDS: Final = 3.0  # until the end of a rank is noticed whose peers have lost it


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of a run's workers: the job, and the group's ways to the run.

    Attributes:
        job: what to run, after preflight.
        record: what was delivered so far; it says which ranks sent a result or a failure.
        deliver: takes the events as they come: it applies them to the record and shows them. It is called several
            times a second, with no events where none came.
        control: says when the run is to stop.
        number: how often the workers were started before.
        share_stop: exchanges with the launchers of other nodes how a stop of the run stands.
    """

    job: Job
    record: RunRecord
    deliver: Deliver
    control: Control
    number: int = 0
    share_stop: ShareStop = share_with_nobody


@dataclass(kw_only=True)
class Member:
    """One worker of a group.

    Attributes:
        rank: its global rank.
        pid: its process id, 0 while nobody knows it.
        has_ended: whether its process has ended, or is lost.
        alive: when its process was last seen alive, by the monotonic clock; None where nobody looks.
    """

    rank: int
    pid: int = 0
    has_ended: bool = False
    alive: float | None = None


MemberT = TypeVar("MemberT", bound=Member)


class WorkerGroup(ABC, Generic[MemberT]):
    """The workers of one attempt, from their start to their end.

    A subclass starts one `Member` for each rank, carries orders and signals to them, and events back. This class does
    the rest: it delivers events, knows who has ended and how, notices hangs, brings the ranks to a common stop and ends
    them. The methods are called in this order: `start`, then `watch` until the state is not `running`, then `settle` or
    `stop`, then `close`. A session calls `poll` in place of `watch`, and may `kill` a worker; before `stop` it tells
    workers to leave, and calls `wait_for_leaving`.

    A subclass finds here what it needs: `_job`, `_record`, `_control`, `_delivery`, and `_members`, which its `start`
    fills.

    Args:
        attempt: the job, and the ways to the run.

    Attributes:
        stopped_ranks: ranks that this group has ended.
        killed: why `kill` was called, by rank.
        hang_watch: notices that no rank does anything any more.
        hang: the report of a hang that ends the run, else empty.
    """

    kill_seconds: ClassVar[float] = math.inf
    """How long `stop` waits for workers that it has killed, in seconds; they are abandoned then."""

    def __init__(self, attempt: Attempt) -> None:
        self._job = attempt.job
        self._record = attempt.record
        self._control = attempt.control
        self._delivery = Delivery(attempt.deliver, attempt.record)
        self._members: list[MemberT] = []
        self._by_rank: dict[int, MemberT] = {}  # some of the members, see `_member`
        self._next_look = 0.0  # for a hang, by the monotonic clock
        self._agreement = StopAgreement(self.tell, attempt.record.held, attempt.control, attempt.share_stop)
        self.stopped_ranks: set[int] = set()
        self.killed: dict[int, str] = {}
        self.hang_watch = HangWatch(
            self._job.hang_timeout,
            self.tell,
            self._delivery.deliver,
            self.send_signal,
            self.find_state,
            self.find_node,
        )
        self.hang = ""

    # -- what a subclass says

    @abstractmethod
    def start(self) -> None:
        """Start a worker for each rank, and let them call their function once all are there.

        It delivers `Phase(name="starting")` for each rank before anything of a worker: nothing is shown of a rank
        that has not started.

        Raises:
            LaunchError: a worker cannot start; `close` still follows.
            StopAsked: the run was asked to stop meanwhile.
        """

    @abstractmethod
    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank; never waits, and may be called from any thread.

        Args:
            order: what the worker shall do; one that has ended does not hear it.
        """

    @abstractmethod
    def receive(self, timeout: float) -> Sequence[Event]:
        """Wait for events of all workers, and return them.

        Args:
            timeout: seconds to wait where nothing comes.

        Returns:
            The events. An `Ended` is the last event of its rank: the worker's process has ended.
        """

    @abstractmethod
    def note_ends(self) -> None:
        """Look for members whose end no `Ended` tells: call `note_end` or `lose` for each; follows each `receive`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the group holds; a worker that still runs is killed."""

    def send_signal(self, rank: int, signum: int) -> None:
        """Send a signal to a worker. What it started is ended after it.

        Args:
            rank: the worker's.
            signum: the signal's number.
        """
        self.tell(SignalOrder(rank=rank, time=time.time(), signum=signum))

    def find_state(self, rank: int) -> str:
        """Return why the process of a worker cannot go on, as the end of a sentence; empty where nobody knows.

        Args:
            rank: the worker's.
        """
        return ""

    def find_node(self, rank: int) -> str:
        """Return the host or node of a rank, where process ids of several machines are told; else empty.

        Args:
            rank: the worker's.
        """
        return ""

    def on_look(self) -> None:
        """Do what else is due, at each look of `watch`."""

    @property
    def has_leftovers(self) -> bool:
        """Whether something runs that an ended worker has started; `poll` ends it."""
        return False

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses of the machines that the workers are on; empty where they are all on this one."""
        return ()

    # -- how the workers stand

    @property
    def pids(self) -> dict[int, int]:
        """Return the process ids by rank, 0 where nobody knows one yet."""
        return {member.rank: member.pid for member in self._members}

    @property
    def is_running(self) -> bool:
        """Whether any worker has not ended."""
        return any(not member.has_ended for member in self._members)

    def list_running(self) -> list[MemberT]:
        """Return the members that have not ended."""
        return [member for member in self._members if not member.has_ended]

    @property
    def is_saving(self) -> bool:
        """Whether workers write a checkpoint in the background that can still become whole: none has left it."""
        saves = self._record.saves
        begun = {save.folders for save in saves.values() if not save.is_over}
        if not begun:  # as at nearly each look, of which there are many
            return False
        left = [saves.get(member.rank) for member in self._members if member.has_ended]
        return self.is_running and any(
            all(save is not None and save.is_over and save.folders == folders for save in left)
            for folders in begun
        )

    # -- watching

    def watch(self, timeout: float = math.inf) -> GroupState:
        """Deliver what comes until the attempt has to end.

        Args:
            timeout: seconds after which the state `running` is returned.

        Returns:
            How the attempt stands.
        """
        deadline = time.monotonic() + timeout
        while True:
            self.poll(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            interrupts.obey_interrupt()
            if self._record.failures:
                return "failed"
            if not self.is_running:
                return "done"
            running = (member.rank for member in self._members if not member.has_ended)
            if self._agreement.is_due(running, is_saving=self.is_saving):
                return "stopped"
            if self._look_for_hang():
                return "hung"
            self.on_look()
            if time.monotonic() >= deadline:
                return "running"

    def poll(self, timeout: float) -> None:
        """Deliver what comes, and note who has ended; returns as soon as something came.

        Args:
            timeout: seconds to wait.
        """
        events = self.receive(timeout)
        self.hang_watch.take(events)
        self._delivery.deliver([event for event in events if not isinstance(event, Ended)])
        for event in events:
            if isinstance(event, Ended):
                member = self._member(event.rank)
                member.pid = event.pid  # one that ended before its function began has not said it
                self.note_end(member, event.exitcode, event.time)
        self.note_ends()

    def _member(self, rank: int) -> MemberT:
        if rank not in self._by_rank:  # it is filled as a whole: each look at all would make it quadratic
            self._by_rank = {member.rank: member for member in self._members}
        return self._by_rank[rank]

    def _look_for_hang(self) -> bool:
        """Report a hang where there is one; return whether the run is to end for it."""
        if self._job.hang_timeout is None or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _HANG_LOOK_SECONDS
        running = {member.rank: member.pid for member in self.list_running()}
        phases = self._record.phases
        told = (rank for rank in running if rank in phases and phases[rank].name == "running")
        ready = {rank for rank in told if self.can_be_asked(rank)}
        report = self.hang_watch.look(running, ready, list(self._record.results))
        self.hang = report if self._job.on_hang == "raise" else ""
        return bool(self.hang)

    def can_be_asked(self, rank: int) -> bool:
        """Return whether a worker whose function runs can say where it is."""
        return True

    def note_end(self, member: MemberT, exitcode: int | None, at: float, last: Sequence[Event] = ()) -> None:
        """Note that a worker's process has ended; a failure where it ended without a word.

        Args:
            member: the worker.
            exitcode: of its process, negative for a signal, None where nobody knows it.
            at: when it ended, in seconds since the epoch.
            last: events that came too late for `receive`.
        """
        member.has_ended = True
        self._delivery.deliver(last)
        if not self._delivery.has_outcome(member.rank) and member.rank not in self.stopped_ranks:
            self._delivery.deliver([self.judge_end(member, exitcode, at)])

    def judge_end(self, member: Member, exitcode: int | None, at: float) -> Event:
        """Return what it means that a worker's process ended without a word: a failure, also with exit code 0.

        Args:
            member: the worker.
            exitcode: of its process, negative for a signal, None where nobody knows it.
            at: when it ended, in seconds since the epoch.
        """
        killer = self.killed.get(member.rank, "")
        if killer:
            exitcode = -signal.SIGKILL  # also where nobody knows it
        elif exitcode == -signal.SIGKILL:
            killer = self.find_killer()
        elif exitcode == -signal.SIGABRT:
            killer = signals.explain_abort(self._record.find_errors(member.rank))
        return Failure(
            rank=member.rank,
            time=at,
            pid=member.pid,
            exitcode=exitcode,
            killer=killer,
            moment=time.monotonic(),
            alive=member.alive,
            node=self.find_node(member.rank),
        )

    def find_killer(self) -> str:
        """Return what the system says of who has killed a worker just now, as a clause; empty where it says nothing."""
        return ""

    def lose(self, member: MemberT, explain: Callable[[MemberT], str]) -> None:
        """Note that a worker is lost: its connection has ended, and nobody saw how its process did.

        The others are ended, because they would wait for it in vain.

        Args:
            member: the worker.
            explain: finds out what became of the worker, once the others have ended.
        """
        now, moment = time.time(), time.monotonic()
        member.has_ended = True
        if self._delivery.is_stopping or self._delivery.has_outcome(member.rank):
            return
        self.stop(_LAST_WORDS_SECONDS, signal.SIGTERM)
        node, text = self.find_node(member.rank), explain(member)
        lost = Failure(rank=member.rank, time=now, pid=member.pid, lost=text, moment=moment, node=node)
        self._delivery.report(lost)

    # -- ending

    def kill(self, rank: int, cause: str) -> None:
        """Kill a worker; any thread may call it, and `poll` delivers the failure.

        Args:
            rank: the worker's.
            cause: why, as a clause for its failure.
        """
        self.killed[rank] = cause
        self.send_signal(rank, signal.SIGKILL)

    def wait_for_leaving(self, grace: float) -> None:
        """Wait for the ends of workers that were told to leave; for a checkpoint longer, unless the user interrupts.

        Args:
            grace: seconds that they have, and have again after they have written a checkpoint.
        """
        began = since = time.monotonic()
        while self.is_running and time.monotonic() - since < grace:
            if self.is_saving and time.monotonic() - began < SAVE_SECONDS and not interrupts.is_interrupted():
                since = time.monotonic()
            self.poll(_END_LOOK_SECONDS)

    def abandon(self, member: MemberT) -> None:
        """Note that a worker was killed and does not end: nobody waits for it any more."""

    def settle(self) -> None:
        """End the workers after a failure; those that end by themselves right now are heard first.

        A rank that has only lost its connection to another one tells of an end that this process does not see yet. A
        checkpoint that they write in the background is finished first, for that has to be done by all of them.
        """
        began = time.monotonic()
        self.hear_last_lines()
        while self.is_running and time.monotonic() - began < self._find_settle_seconds():
            self.poll(_LAST_WORDS_SECONDS / 5)
        self._finish_saves()
        self.stop(_SETTLE_SECONDS, signal.SIGTERM)

    def hear_last_lines(self) -> None:
        """Let workers that are about to be ended write out what they have printed without a newline."""
        began = time.monotonic()
        for member in self.list_running():
            self.tell(WriteOrder(rank=member.rank, time=time.time()))
        while self.is_running and time.monotonic() - began < _LAST_WORDS_SECONDS:
            self.poll(_LAST_WORDS_SECONDS / 5)

    def _finish_saves(self) -> None:
        """Wait for a checkpoint that is being written, unless the user interrupts, or wants to stop sooner."""
        began, is_told = time.monotonic(), False
        while self.is_saving:
            waited = time.monotonic() - began
            grace = self._control.grace if self._control.stop_is_asked else SAVE_SECONDS
            if waited >= min(grace, SAVE_SECONDS) or interrupts.take_interrupt():
                return
            if waited >= _TELL_SECONDS and not is_told:
                is_told = True
                self._tell_of_saves(f"is still being saved in the background: that has {SAVE_SECONDS:g} s")
            self.poll(_END_LOOK_SECONDS)
        self._hear_last_words(_SETTLE_SECONDS)

    def _hear_last_words(self, seconds: float) -> None:
        """Wait for ranks whose function is over: those that have written a checkpoint end now, and say how it went."""
        saves, began = self._record.saves, time.monotonic()
        while time.monotonic() - began < seconds and any(
            member.rank in saves and self._delivery.has_outcome(member.rank) for member in self.list_running()
        ):
            self.poll(_END_LOOK_SECONDS)

    def _tell_of_saves(self, what: str) -> None:
        """Say something in the cell of each checkpoint that is being written."""
        names = {save.name for save in self._record.saves.values() if not save.is_over}
        for name in sorted(names):
            notice = Notice(rank=-1, time=time.time(), text=f"checkpoint {name} {what}")
            self._delivery.deliver([notice])

    def _drop_saves(self) -> None:
        """Tell of checkpoints that nobody writes any more, and remove what there is of them where it is known to be."""
        dropped = [save for save in self._record.saves.values() if not save.is_over]
        if not dropped:
            return
        self._tell_of_saves(
            "was still being saved in the background when its ranks ended, and is dropped: what was there before is "
            "untouched"
        )
        is_here = self._job.rendezvous.num_nodes == 1 and not self.addresses
        if is_here and not self.is_running:  # else others may write, or have other disks
            for path in {path for save in dropped for path in save.folders}:
                shutil.rmtree(path, ignore_errors=True)
        self._delivery.deliver([replace(save, is_over=True) for save in dropped])

    def _find_settle_seconds(self) -> float:
        found = self._record.failures
        follows = bool(found) and failures.is_lost_peer(failures.find_first(found))
        return _PEER_END_SECONDS if follows else _LAST_WORDS_SECONDS

    def stop(self, grace: float, signum: int = signal.SIGINT) -> None:
        """End every worker, and all that the workers started.

        Args:
            grace: seconds that workers have to end after the signal, before they are killed; 0 kills at once.
            signum: the signal.
        """
        self._delivery.begin_to_stop()
        self.stopped_ranks.update(member.rank for member in self.list_running())
        if grace > 0:
            self._signal_and_wait(signum, grace)
        self._signal_and_wait(signal.SIGKILL, self.kill_seconds, may_be_interrupted=True)
        for member in self.list_running():
            self.abandon(member)
        self._drop_saves()

    def _signal_and_wait(self, signum: int, seconds: float, *, may_be_interrupted: bool = False) -> None:
        for member in self.list_running():
            self.send_signal(member.rank, signum)
        began = time.monotonic()
        while self.is_running and time.monotonic() - began < seconds:
            if may_be_interrupted and interrupts.is_interrupted():
                seconds = min(seconds, _LEAST_KILL_SECONDS)
            self.poll(_END_LOOK_SECONDS)
