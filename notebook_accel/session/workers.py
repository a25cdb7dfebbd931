"""The worker processes of a session, and the thread of the notebook that reads their events."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

from torch.distributed import TCPStore

from .. import interrupts, notices
from ..errors import SessionError
from ..events import CallOrder, Event, Failure, LeaveOrder, Lines, Notice
from ..launch.agent.parent_state import ParentState
from ..launch.engines import stores
from ..launch.engines.base import Engine
from ..launch.engines.local import make_environments
from ..launch.job import Job
from ..launch.supervise.control import Control
from ..launch.supervise.local_group import LocalWorkerGroup
from ..launch.supervise.worker_group import Attempt, WorkerGroup
from ..launch.transfer import cell_sources, failures
from ..launch.transfer.pickled import Pickled
from ..launch.transfer.unpicklable import pack_call, unpack_value
from ..stream.record import RunRecord
from ..stream.sinks import Sink
from ..takeover import finder
from . import service
from .call import Call

RESTART: Final = "session.restart() starts new workers, without their variables"
_NEW_GROUP: Final = (
    "the process group was made anew, because ranks may disagree about the last one: "
    "models that DistributedDataParallel wrapped before must be prepared again"
)
_POLL_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.05
_MAX_WAITING: Final = 1_000
"""Events, each with many lines perhaps, that are not shown yet; with more of them the workers have to wait."""
_MAX_LATE: Final = 100  # events of lines between two calls, of which the last are shown
_LEAVE_SECONDS: Final = 1.0
_RENEW_SECONDS: Final = 60.0
_AGAIN_SECONDS: Final = 0.5  # what comes sooner is the same interrupt, sent twice


class Workers:
    """Processes that wait for calls, and a thread that reads their events all the time.

    During a call the calling thread shows the events. What was printed between calls is shown by the next one.

    Args:
        job: its `serve` is what the workers run.
        engine: starts them.

    Attributes:
        record: all events of the workers so far; its failures are the ends of workers.
        pids: process ids by rank.
        call: the call that runs now; None without one.
        calls: number of calls that have ended.
        late: lines that came after the last call, to be shown by the next one.
        broken: why the workers cannot be used any more although they run, as a clause; empty if they can be.
    """

    def __init__(self, job: Job, engine: Engine) -> None:
        self.record = RunRecord()
        self.pids: dict[int, int] = {}
        self.call: Call | None = None
        self.calls = 0
        self.late: deque[Lines] = deque(maxlen=_MAX_LATE)
        self.broken = ""
        self._job = job
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._leaving = threading.Event()
        self._closing = threading.RLock()
        self._known_sources: set[str] = set()
        self._owner = os.getpid()
        self._store: TCPStore | None = None
        self._group = self._make_group(engine)
        self._reader = threading.Thread(target=self._read, name="notebook_accel session", daemon=True)

    # -- start and end

    def _make_group(self, engine: Engine) -> WorkerGroup[Any]:
        """Make the processes, which do not run yet; on this machine they meet at a store of this process."""
        attempt = Attempt(job=self._job, record=self.record, deliver=self._receive, control=Control())
        group = engine.make_session_group(self._job, attempt)
        if group is not None:
            return group
        self._store = stores.open_store(self._job.rendezvous)
        return _make_local_group(attempt, self._store.port)

    def start(self) -> None:
        """Start all processes; `close` follows also where that fails.

        Raises:
            LaunchError: the system gives no further process.
        """
        self._group.start()
        self.pids = self._group.pids
        self._reader.start()

    @property
    def is_over(self) -> bool:
        """Whether `close` was called."""
        return self._leaving.is_set()

    @property
    def dead(self) -> dict[int, Failure]:
        """How each worker ended that has ended, by rank."""
        return {failure.rank: failure for failure in self.record.failures}

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
            may_leave = self._reader.is_alive() and not (self.call or self.problem)
            if may_leave:
                for rank in self.pids:
                    self._group.tell(LeaveOrder(rank=rank, time=time.time()))
            self._leaving.set()
            if self._reader.is_alive():
                self._reader.join()
            if may_leave:
                self._group.wait_for_leaving(_LEAVE_SECONDS)
            self._group.stop(0.0)
            self._group.close()
            self._store = None
            with self._changed:
                self._changed.notify_all()

    # -- events

    def _read(self) -> None:
        try:
            while not self._leaving.is_set() and (self._group.is_running or self._group.has_leftovers):
                self._group.poll(_POLL_SECONDS)
                with self._changed:
                    if self.call is not None:
                        self.call.advance()
        except Exception as error:  # this thread ends: a call that waits for events has to know
            with self._changed:
                self.broken = f"what the workers send cannot be read ({type(error).__name__}: {error})"
                self._changed.notify_all()

    def _receive(self, events: Sequence[Event]) -> None:
        """Take events in the reader's thread, and wait while too many are not shown yet."""
        if not events:
            return
        with self._changed:
            self.record.apply_all(events)
            for event in events:
                if self.call is not None:
                    self.call.take(event)
                elif isinstance(event, Notice):
                    notices.tell(event.text)
                elif isinstance(event, Lines):
                    self.late.append(event)
            self._changed.notify_all()
            while self.call is not None and len(self.call.waiting) > _MAX_WAITING:
                if self._leaving.is_set():
                    break
                self._changed.wait(_LOOK_SECONDS)

    @property
    def problem(self) -> str:
        """Why the workers cannot be used any more, as clauses; empty if they can be."""
        ends = [failures.describe_failure(failure) for _, failure in sorted(self.dead.items())]
        return self.broken or "; ".join(ends)

    # -- calls

    def begin(
        self,
        pickled: Pickled,
        name: str,
        ranks: Collection[int],
        sending: Collection[int],
        grace: float = 1.0,
    ) -> Call:
        """Send a call to workers.

        The caller then calls `show` until no rank of the call is unfinished, and at last `finish`. It delays interrupts
        meanwhile: one between two of these steps would leave the session busy for ever.

        Args:
            pickled: function and arguments.
            name: name of the call, for messages.
            ranks: ranks that make the call.
            sending: those of them that send their value.
            grace: seconds that ranks have to return after another one has failed.

        Returns:
            The state of the call.

        Raises:
            SessionError: another call is running.
        """
        new = cell_sources.collect(self._known_sources)
        with self._changed:
            if (running := self.call) is not None:
                raise SessionError(
                    f"the session is busy with {running.name} for {running.start.seconds:.1f} s: it makes one call at "
                    "a time. Wait for its end, or stop it"
                )
            self.call = call = Call(
                number=next(self._numbers), name=name, ranks=frozenset(ranks), group=self._group, grace=grace
            )
            for event in (*self.record.failures, *self.late):
                call.take(event)
            self.late.clear()
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

    def show(self, call: Call, sink: Sink) -> None:
        """Show the new events of a call, or wait a moment for some.

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
            self._changed.notify_all()
        sink.show(events)
        if call.unfinished and self._leaving.is_set():
            raise SessionError(f"the session was closed while {call.name} ran")
        if call.unfinished and self.broken:
            raise SessionError(f"{self.broken}: {RESTART}")

    def bring_back(self, call: Call, sink: Sink) -> None:
        """End a call on all ranks at once, and wait for that; whoever interrupts again does not wait, ranks are killed.

        Args:
            call: the call that runs.
            sink: shows what comes meanwhile.

        Raises:
            SessionError: what `show` raises.
        """
        began = time.monotonic()
        with self._changed:
            call.bring_back(0.0)
        while call.unfinished:
            self.show(call, sink)
            if interrupts.take_interrupt() and time.monotonic() - began > _AGAIN_SECONDS:
                with self._changed:
                    call.kill_unfinished()

    def finish(self, call: Call, sink: Sink) -> list[str]:
        """Make the workers ready for the next call, and return notes about this for the user.

        Args:
            call: has ended on all ranks.
            sink: shows what the workers print meanwhile.
        """
        self.calls += 1
        self._end()
        if self.dead:
            return [RESTART]
        if not self._needs_new_group(call):
            return []
        try:
            self._renew_group(sink)
        except SessionError as error:
            return [str(error)]
        return [_NEW_GROUP] if call.failures else []

    def _end(self) -> None:
        with self._changed:
            self.call = None

    # -- the process group

    def _needs_new_group(self, call: Call) -> bool:
        """Return whether the ranks need a new process group, because they may disagree about the last one.

        They may disagree if connections between ranks had to be closed, if a rank has left the group, or if the call
        failed and some ranks began more collectives than others.
        """
        if len(self.pids) == 1:
            return False
        if call.was_released or None in call.collectives.values():
            return True
        begun = [call.collectives.get(rank, {}) for rank in self.pids]
        return bool(call.failures) and any(other != begun[0] for other in begun)

    def _renew_group(self, sink: Sink) -> None:
        """Join all ranks in a new process group with a new store; SessionError where that fails."""
        if self._group.addresses:  # the host of rank 0 is the place that all others reach
            opened = self._make_call(pack_call(service.open_store, (), {}, "open_store"), (0,), sink)
            store, port = None, int(unpack_value(opened.results[0]))
        else:
            store = stores.open_store(self._job.rendezvous)
            port = store.port
        arguments = (port, list(self.pids.values()), list(self._group.addresses))
        self._make_call(pack_call(service.renew, arguments, {}, "renew"), self.pids, sink)
        self._store = store

    def _make_call(self, pickled: Pickled, ranks: Collection[int], sink: Sink) -> Call:
        """Make a call for a new process group; SessionError where it fails."""
        call = self.begin(pickled, "making the process group anew", ranks, ranks)
        try:
            with self._changed:
                call.bring_back(_RENEW_SECONDS)
            while call.unfinished:
                self.show(call, sink)
        finally:
            self._end()
        if call.failures:
            self.broken = "the process group could not be made anew"
            raise SessionError(f"{self.broken}: {RESTART}")
        return call


def _make_local_group(attempt: Attempt, port: int) -> LocalWorkerGroup:
    """Make processes of this machine; the store of their process group is at `port`."""
    parent_state = ParentState.capture(attempt.job)
    environments = make_environments(attempt.job, parent_state, port)
    return LocalWorkerGroup(attempt, payload=None, environments=environments, parent_state=parent_state)
