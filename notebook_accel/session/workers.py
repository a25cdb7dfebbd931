"""The worker processes of a session, and the thread of the notebook that reads their events."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from torch.distributed import TCPStore

from .. import interrupts, notices
from ..errors import SessionError
from ..events import (
    CallEnd,
    CallOrder,
    Event,
    Failure,
    Held,
    LeaveOrder,
    Lines,
    Notice,
    Order,
    Phase,
    StackReport,
)
from ..launch import signals
from ..launch.engines.base import Engine
from ..launch.engines.local import make_environments
from ..launch.engines.nodes import stores
from ..launch.job import Job
from ..launch.rank_names import name_process
from ..launch.supervise import hang_report
from ..launch.supervise.control import Control
from ..launch.supervise.local_group import LocalWorkerGroup
from ..launch.supervise.worker_group import SAVE_SECONDS, Attempt, WorkerGroup
from ..launch.transfer import cell_sources, failures
from ..launch.transfer.parent_state import ParentState
from ..launch.transfer.pickled import Pickled
from ..launch.transfer.unpicklable import pack_call, unpack_value
from ..stream.record import RunRecord
from ..stream.sinks import Sink
from ..takeover import finder
from . import service
from .call import Call, put_output_first

_POLL_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.05
_MAX_WAITING: Final = 20_000
"""Events and lines that are not shown yet; with more of them the workers have to wait."""
_LEAVE_SECONDS: Final = 1.0
_RENEW_SECONDS: Final = 30.0
_AGAIN_SECONDS: Final = 0.5  # what comes sooner is the same interrupt, sent twice


class Workers:
    """Processes that wait for calls, and a thread that reads their events all the time.

    During a call the calling thread shows the events. Events between calls are only recorded.

    Args:
        job: its `serve` is what the workers run.
        engine: starts them.

    Attributes:
        job: what the workers run.
        record: all events of the workers so far.
        dead: how each worker ended that has ended, by rank.
        killed: ranks that were killed, because they did not return from a call.
        calls: number of calls that have ended.
        late_lines: number of lines that came after the last call.
        broken: why the workers cannot be used any more, as a clause; empty if they can be.
        pids: process ids by rank.
        started: whether the processes were started.
    """

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self.record = RunRecord()
        self.dead: dict[int, Failure] = {}
        self.killed: set[int] = set()
        self.calls = 0
        self.late_lines = 0
        self.broken = ""
        self._positions: dict[int, Mapping[str, int]] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._call_lock = threading.Lock()  # held from `begin` to `end`
        self._call: Call | None = None
        self._leaving = threading.Event()
        self._closing = threading.RLock()
        self._known_sources: set[str] = set()
        self._owner = os.getpid()
        self._store: TCPStore | None = None
        self._group = self._make_group(engine)
        self._reader = threading.Thread(target=self._read, name="notebook_accel session", daemon=True)
        self.pids: dict[int, int] = {}
        self.started = False

    # -- start and end

    def start(self) -> None:
        """Start all processes.

        Raises:
            LaunchError: the system gives no further process. Those that were started have ended.
        """
        try:
            self._group.start()
            self.pids = self._group.pids
            self._reader.start()
            self.started = True
        except BaseException:
            self.close()
            raise

    def note_late_lines(self, sink: Sink) -> None:
        """Say how many lines came between the calls.

        Args:
            sink: of the next call.
        """
        if count := self.late_lines:
            lines = "line" if count == 1 else "lines"
            sink.note(f"{count} {lines} came between the calls: session.lines() has them")

    def _make_group(self, engine: Engine) -> WorkerGroup[Any]:
        """Make the processes, which do not run yet; on this machine they meet at a store of this process."""
        attempt = Attempt(job=self.job, record=self.record, deliver=self._receive, control=Control())
        group = engine.make_session_group(self.job, attempt)
        if group is not None:
            return group
        self._store = stores.open_store(self.job.rendezvous)
        return self._make_local_group(attempt, self._store.port)

    def _make_local_group(self, attempt: Attempt, port: int) -> LocalWorkerGroup:
        """Make processes of this machine; the store of their process group is at `port`."""
        parent_state = ParentState.capture(self.job)
        environments = make_environments(self.job, parent_state, port)
        return LocalWorkerGroup(attempt, payload=None, environments=environments, parent_state=parent_state)

    @property
    def is_over(self) -> bool:
        """Whether `close` was called."""
        return self._leaving.is_set()

    @property
    def current(self) -> Call | None:
        """The call that runs now; None without one."""
        return self._call

    def close(self) -> None:
        """End the workers and wait until they have ended.

        Workers that are not in a call have a second to exit, more where they write a checkpoint in the background. The
        others are killed. In a forked copy of the process that started them nothing happens.
        """
        if os.getpid() != self._owner:
            return
        if threading.current_thread() is self._reader:  # garbage collection ran in it; it cannot join itself
            threading.Thread(target=self.close, name="notebook_accel session ends").start()
            return
        with interrupts.delay_interrupt(), self._closing:
            if self._leaving.is_set():
                return
            if self.started and self._call is None and not self.dead and not self.broken:
                for rank in self.pids:
                    self._group.tell(LeaveOrder(rank=rank, time=time.time()))
                self._let_leave()
            self._leaving.set()
            if self.started:
                self._reader.join()
            self._group.stop(0.0)
            self._group.close()
            self._store = None
            with self._changed:
                self._changed.notify_all()

    def _let_leave(self) -> None:
        """Give the workers time to exit: more where they still write a checkpoint, unless the user interrupts."""
        began = time.monotonic()
        end = began + _LEAVE_SECONDS
        while self._reader.is_alive() and (now := time.monotonic()) < end:
            if self._group.is_saving and now < began + SAVE_SECONDS and not interrupts.is_interrupted():
                end = now + _LEAVE_SECONDS
            self._reader.join(_LOOK_SECONDS)

    # -- events

    def _read(self) -> None:
        try:
            while not self._leaving.is_set() and (self._group.is_running or self._group.has_leftovers):
                self._group.poll(_POLL_SECONDS)
        except Exception as error:  # this thread ends: a call that waits for events has to know
            with self._changed:
                self.broken = f"what the workers send cannot be read ({type(error).__name__}: {error})"
                self._changed.notify_all()

    def _receive(self, events: Sequence[Event]) -> None:
        """Take events in the reader's thread, and wait while too many are not shown yet."""
        if not events:
            return
        with self._changed:
            for event in put_output_first(events, lambda rank: self._group.drain(rank)):
                self._take(event)
            self._changed.notify_all()
            while (call := self._call) is not None and call.num_waiting > _MAX_WAITING:
                if self._leaving.is_set():
                    break
                self._changed.wait(_POLL_SECONDS)

    def _take(self, event: Event) -> None:
        if isinstance(event, Failure):
            self.dead[event.rank] = event
        elif not isinstance(event, (CallEnd, Held, StackReport)):
            self.record.apply(event)
        if self._call is not None:
            self._call.take(event)
        elif isinstance(event, Notice):
            notices.tell(event.text)
        elif isinstance(event, Lines):
            self.late_lines += len(event.texts)

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the last lines of output.

        Args:
            rank: whose lines; None is all ranks.
        """
        with self._changed:
            return self.record.lines(rank)

    def describe_ends(self) -> list[str]:
        """Return one line for each worker that has ended about how it ended."""
        return [self._describe_end(self.dead[rank]) for rank in sorted(self.dead)]

    def find_own(self, call: Call) -> dict[int, Failure]:
        """Return the failures of a call, by rank, without those of ranks that were made to end.

        A rank that had died, or lost a peer that had, did so by itself: an interrupt may go before the news comes. In a
        call that the user stopped the interrupt came first.

        Args:
            call: the call that has ended.
        """

        def was_ended(failure: Failure) -> bool:
            if failure.error is None:
                return failure.rank in self.killed
            return call.was_released or not failures.is_lost_peer(failure)

        return {
            rank: failure
            for rank, failure in call.failures.items()
            if rank not in call.interrupted or not (call.was_interrupted or was_ended(failure))
        }

    def describe_stopped(self, failure: Failure) -> str:
        """Return a line about a rank that was interrupted: where it was, or how it ended.

        Args:
            failure: of this rank.
        """
        if failure.error is None:
            return self._describe_end(failure)
        frame = hang_report.find_frame_of_error(failure.error)
        place = f" in {hang_report.describe_frame(frame)}" if frame is not None else ""
        return f"{name_process(failure.rank, failure.pid, failure.node)} was stopped{place}"

    def _describe_end(self, failure: Failure) -> str:
        if failure.rank in self.killed:
            who = name_process(failure.rank, failure.pid, failure.node)
            return f"{who} did not come back and was killed"
        return failures.describe_failure(failure)

    def describe_future(self) -> str:
        """Return a clause that says whether there will be another call, for whoever stopped one."""
        if not self.dead and not self.broken:
            return "the session goes on"
        with_it = ", ".join(f"rank {rank}" for rank in sorted(self.dead)) or "the process group"
        return f"and {with_it} with it: session.restart() starts new workers"

    # -- calls

    def begin(
        self,
        pickled: Pickled,
        name: str,
        ranks: Collection[int],
        sending: Collection[int],
        grace: float = 1.0,
        hang_timeout: float | None = None,
    ) -> Call:
        """Send a call to workers.

        The caller then calls `show` until no rank of the call is unfinished, and at last `end`. It delays interrupts
        meanwhile: one between two of these steps would leave the session busy for ever.

        Args:
            pickled: function and arguments.
            name: name of the call, for messages.
            ranks: ranks that make the call.
            sending: those of them that send their value.
            grace: seconds that ranks have to return after another one has failed.
            hang_timeout: seconds after which a wait for ranks that are not in the collective is reported; None never
                reports one.

        Returns:
            The state of the call.

        Raises:
            SessionError: another call is running.
        """
        if not self._call_lock.acquire(blocking=False):
            call = self._call
            doing = f"{call.name} for {call.seconds:.1f} s" if call is not None else "another call"
            raise SessionError(
                f"the session is busy with {doing}: it makes one call at a time. Wait for its end, or stop it"
            )
        call = Call(
            number=next(self._numbers),
            name=name,
            ranks=frozenset(ranks),
            pids=self.pids,
            tell=self._tell,
            kill=self._kill,
            addresses=self._group.addresses,
            grace=grace,
            hang_timeout=hang_timeout,
        )
        new = cell_sources.collect(self._known_sources)
        with self._changed:
            self._call = call
            for rank in self.dead.keys() & call.ranks:
                call.take(self.dead[rank])
        for rank in call.ranks:
            order = CallOrder(
                rank=rank,
                time=time.time(),
                call=call.number,
                work=pickle.PickleBuffer(pickled.data),
                buffers=pickled.buffers,
                sends_value=rank in sending,
                as_accelerate=finder.is_installed(),
                sources=new,
            )
            self._group.tell(order)
        if call.ranks == self.pids.keys():
            self._known_sources.update(new)
        return call

    def _tell(self, order: Order) -> None:
        with interrupts.delay_interrupt():  # a worker could not read what follows half an order
            self._group.tell(order)

    def _kill(self, rank: int) -> None:
        self.killed.add(rank)
        self._group.send_signal(rank, signals.KILL)  # the group ends what it started

    def show(self, call: Call, sink: Sink) -> None:
        """Show the new events of a call, or wait a moment for some. Then take the next step if one is due.

        A step is to interrupt or kill ranks that have to end, or to look for a hang.

        Args:
            call: the call that runs.
            sink: shows the events.

        Raises:
            SessionError: the session was closed, or its workers cannot be used any more.
        """
        with self._changed:
            if not call.waiting and call.unfinished and not self._leaving.is_set():
                self._changed.wait(_LOOK_SECONDS)
            events = list(call.waiting)
            call.waiting.clear()
            if call.num_waiting > _MAX_WAITING:
                self._changed.notify_all()
            call.num_waiting = 0
        if events:
            sink.show(events)
        if self._leaving.is_set() and call.unfinished:
            raise SessionError(f"the session was closed while {call.name} ran")
        if self.broken and call.unfinished:
            raise SessionError(
                f"{self.broken}: session.restart() starts new workers, without their variables"
            )
        call.advance(sink)

    def bring_back(self, call: Call, sink: Sink) -> None:
        """End a call on all ranks at once, and wait for that; whoever interrupts again does not wait, ranks are killed.

        Args:
            call: the call that runs.
            sink: shows what comes meanwhile.

        Raises:
            SessionError: what `show` raises.
        """
        began = time.monotonic()
        call.bring_back(0.0)
        while call.unfinished:
            self.show(call, sink)
            if interrupts.take_interrupt() and time.monotonic() - began > _AGAIN_SECONDS:
                call.kill_unfinished()

    def end(self, call: Call) -> None:
        """Finish a call, so that the next one can begin.

        Args:
            call: the call that has ended.
        """
        with self._changed:
            if self._call is call:
                self._call = None
                self.late_lines = 0
                self._positions.update(
                    {rank: found for rank, found in call.positions.items() if found is not None}
                )
                self._call_lock.release()

    # -- the process group

    def needs_new_group(self, call: Call) -> bool:
        """Return whether the ranks need a new process group after a call, because they may disagree about the last one.

        They may disagree if connections between ranks had to be closed, if a rank has left the group, or if the call
        failed and some ranks began more collectives than others.

        Args:
            call: the call that has ended; `end` was not called yet.
        """
        if len(self.pids) == 1 or self.dead:
            return False
        if call.was_released or None in call.positions.values():
            return True
        if not call.failures:
            return False
        begun = [_count_begun(self._positions.get(rank, {}), call.positions.get(rank)) for rank in self.pids]
        return any(other != begun[0] for other in begun)

    def renew_group(self, sink: Sink) -> None:
        """Join all ranks in a new process group with a new store.

        Args:
            sink: shows what the workers print.

        Raises:
            SessionError: the ranks could not be joined. The session needs a restart.
        """
        if self._group.addresses:  # the host of rank 0 is the place that all others reach
            opened = self._make_call(pack_call(service.open_store, (), {}, "open_store"), (0,), sink)
            store, port = None, int(unpack_value(opened.results[0]))
        else:
            store = stores.open_store(self.job.rendezvous)
            port = store.port
        arguments = (port, list(self.pids.values()), list(self._group.addresses))
        self._make_call(pack_call(service.renew, arguments, {}, "renew"), self.pids, sink)
        self._store = store

    def _make_call(self, pickled: Pickled, ranks: Collection[int], sink: Sink) -> Call:
        """Make a call for a new process group; SessionError where it fails."""
        call = self.begin(pickled, "making the process group anew", ranks, ranks)
        try:
            deadline = time.monotonic() + _RENEW_SECONDS
            while call.unfinished:
                self.show(call, sink)
                if time.monotonic() > deadline:
                    call.bring_back(0.0)
        finally:
            self.end(call)
        if call.failures:
            self.broken = "the process group could not be made anew"
            raise SessionError(
                f"{self.broken}: session.restart() starts new workers, without their variables"
            )
        return call


def _count_begun(before: Mapping[str, int], after: Mapping[str, int] | None) -> dict[str, int]:
    """Return how many collectives began in each process group between two counts, without groups that began none."""
    counts = {name: count - before.get(name, 0) for name, count in (after or {}).items()}
    return {name: count for name, count in counts.items() if count}


def make_start_phases(ranks: Collection[int]) -> list[Event]:
    """Return the events from which a sink learns which ranks there are. It prints nothing for them.

    Args:
        ranks: all ranks.
    """
    now = time.time()
    return [Phase(rank=rank, time=now, name="starting") for rank in ranks]
