"""In the notebook: the worker processes of a session, and the thread that reads what they send."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from torch.distributed import TCPStore

from ..errors import SessionError
from ..events import CallEnd, CallOrder, Event, Failure, Held, LeaveOrder, Line, Order, Phase, Where
from ..launch import failures, signals, sources, variables
from ..launch.control import Control
from ..launch.crew import Crew
from ..launch.culprit import pack_call
from ..launch.engines.nodes import stores
from ..launch.job import Job
from ..launch.parcel import Parcel
from ..launch.surroundings import Surroundings
from ..stream.record import RunRecord
from ..stream.sinks import Sink
from . import service
from .call import Call

_POLL_SECONDS: Final = 0.1
_LOOK_SECONDS: Final = 0.05
_MAX_WAITING: Final = 20_000  # events that the cell has not shown: workers that write faster wait
_LEAVE_SECONDS: Final = 1.0
_RENEW_SECONDS: Final = 30.0


class Workers:
    """Processes that wait for calls, and the thread that always reads what they send.

    During a call the calling thread shows what the reader hands over; what comes between calls is kept only.

    Attributes:
        record: everything that they have said.
        dead: how workers ended that have; `killed` are those that were killed because they did not come back.
        calls: how many calls there were.
        late_lines: lines that came between calls since the last one.
    """

    def __init__(self, job: Job) -> None:
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
        self._taken = threading.Lock()
        self._call: Call | None = None
        self._leaving = threading.Event()
        self._closing = threading.RLock()
        self._known_sources: set[str] = set()
        self._owner = os.getpid()
        self._store: TCPStore | None = stores.opened(job.rendezvous)
        self._crew = Crew(job, None, self.record, self._receive, Control())
        self._reader = threading.Thread(target=self._read, name="notebook_accel session", daemon=True)
        self.pids: dict[int, int] = {}
        self.started = False

    # -- their life

    def start(self) -> None:
        """Start the processes and join them in a process group; all end where one cannot."""
        count = self.job.local_world_size
        assert self._store is not None
        port = self._store.port
        surroundings = Surroundings.capture(self.job)
        environments = {
            rank: self._environment(rank, count, port, surroundings.variables) for rank in range(count)
        }
        try:
            self._crew.start(environments, variables.threads(self.job), surroundings)
            self.pids = self._crew.pids
            self._reader.start()
            self.started = True
        except BaseException:
            self.close()
            raise

    def _environment(self, rank: int, count: int, port: int, own: Mapping[str, str]) -> dict[str, str]:
        return variables.of_worker(
            self.job,
            own,
            alone=True,
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=count,
            LOCAL_WORLD_SIZE=count,
            GROUP_RANK=0,
            GROUP_WORLD_SIZE=1,
            MASTER_ADDR=self.job.rendezvous.address,
            MASTER_PORT=port,
            TORCHELASTIC_USE_AGENT_STORE=True,
            TORCHELASTIC_RESTART_COUNT=0,
            TORCHELASTIC_MAX_RESTARTS=0,
            TORCHELASTIC_RUN_ID=self.job.rendezvous.run_id,
        )

    @property
    def is_over(self) -> bool:
        """Whether `close` was called."""
        return self._leaving.is_set()

    @property
    def current(self) -> Call | None:
        """The call that is going on."""
        return self._call

    def close(self) -> None:
        """End the workers: by themselves within a second, unless they are in a call; returns when they have ended.

        In a process forked off the one that started them nothing happens.
        """
        if os.getpid() != self._owner:
            return
        if threading.current_thread() is self._reader:  # the last reference to a session ended just there
            threading.Thread(target=self.close, name="notebook_accel session ends").start()
            return
        with signals.interrupt_held(), self._closing:
            if self._leaving.is_set():
                return
            if self.started and self._call is None and not self.dead and not self.broken:
                for rank in self.pids:
                    self._crew.tell(LeaveOrder(rank=rank, time=time.time()))
                self._reader.join(_LEAVE_SECONDS)
            self._leaving.set()
            if self.started:
                self._reader.join()
            self._crew.stop(0.0)
            self._crew.close()
            self._store = None
            with self._changed:
                self._changed.notify_all()

    def filenos(self) -> list[int]:
        """Return the descriptors that other workers, forked from this process, must not keep."""
        return [] if self._leaving.is_set() else self._crew.filenos()

    # -- what they send

    def _read(self) -> None:
        try:
            while not self._leaving.is_set() and self._crew.is_running:
                self._crew.poll(_POLL_SECONDS)
        except Exception as error:  # nobody would read any more: a call that waits has to hear of it
            with self._changed:
                self.broken = f"what the workers send cannot be read ({type(error).__name__}: {error})"
                self._changed.notify_all()

    def _receive(self, events: Sequence[Event]) -> None:
        """Take events, in the reader's thread."""
        if not events:
            return
        with self._changed:
            for event in events:
                if isinstance(event, CallEnd):
                    for earlier in self._crew.drain(event.rank):
                        self._take(earlier)
                self._take(event)
            self._changed.notify_all()
            while (call := self._call) is not None and len(call.waiting) > _MAX_WAITING:
                if self._leaving.is_set():
                    break
                self._changed.wait(_POLL_SECONDS)

    def _take(self, event: Event) -> None:
        if isinstance(event, Failure):
            self.dead[event.rank] = event
        elif not isinstance(event, (CallEnd, Held, Where)):
            self.record.apply(event)
        if self._call is not None:
            self._call.take(event)
        elif isinstance(event, Line):
            self.late_lines += 1

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the last lines of one rank, or of all."""
        with self._changed:
            return self.record.lines(rank)

    def causes(self) -> list[str]:
        """Say of each worker that has ended how it did."""
        return [
            (killed_line if rank in self.killed else failures.one_line)(self.dead[rank])
            for rank in sorted(self.dead)
        ]

    # -- calls

    def begin(
        self,
        parcel: Parcel,
        name: str,
        ranks: Collection[int],
        sending: Collection[int],
        grace: float = 1.0,
        hang_timeout: float | None = None,
    ) -> Call:
        """Order a call; the caller shows its events by `show` until nobody is `left`, then calls `end`.

        Raises:
            SessionError: another call is going on.
        """
        if not self._taken.acquire(blocking=False):
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
            grace=grace,
            hang_timeout=hang_timeout,
        )
        new = sources.collect(self._known_sources)
        with signals.interrupt_held():  # who interrupts finds the call in `current`
            with self._changed:
                self._call = call
                for rank in self.dead.keys() & call.ranks:
                    call.take(self.dead[rank])
            for rank in call.ranks:
                order = CallOrder(
                    rank=rank,
                    time=time.time(),
                    call=call.number,
                    work=pickle.PickleBuffer(parcel.pickled),
                    buffers=parcel.buffers,
                    sends_value=rank in sending,
                    sources=new,
                )
                self._crew.tell(order)
            if call.ranks == self.pids.keys():
                self._known_sources.update(new)
        return call

    def _tell(self, order: Order) -> None:
        with signals.interrupt_held():  # half an order would make the rest unreadable
            self._crew.tell(order)

    def _kill(self, rank: int) -> None:
        self.killed.add(rank)
        if not signals.kill_group(self.pids[rank]):
            signals.end_now(self.pids[rank])

    def show(self, call: Call, sink: Sink) -> None:
        """Show what has come of a call, and do what is due; waits a moment where nothing has come."""
        with self._changed:
            if not call.waiting and call.left and not self._leaving.is_set():
                self._changed.wait(_LOOK_SECONDS)
            events = list(call.waiting)
            call.waiting.clear()
            if len(events) > _MAX_WAITING:
                self._changed.notify_all()
        if events:
            sink.show(events)
        if self._leaving.is_set() and call.left:
            raise SessionError(f"the session was closed while {call.name} ran")
        if self.broken and call.left:
            raise SessionError(
                f"{self.broken}: session.restart() starts new workers, without their variables"
            )
        call.advance(sink)

    def end(self, call: Call) -> None:
        """Let the next call begin."""
        with self._changed:
            if self._call is call:
                self._call = None
                self.late_lines = 0
                self._positions.update(
                    {rank: found for rank, found in call.positions.items() if found is not None}
                )
                self._taken.release()

    # -- the group

    def needs_group(self, call: Call) -> bool:
        """Whether the ranks can be in one group no more, after a call that has not ended yet by `end`.

        They disagree where a wait had to be ended, where one has left the group, or where in a call that did not end
        well some began more collectives than others.
        """
        if len(self.pids) == 1 or self.dead:
            return False
        if call.was_released or None in call.positions.values():
            return True
        if not call.failures:
            return False
        begun = [_grown(self._positions.get(rank, {}), call.positions.get(rank)) for rank in self.pids]
        return any(other != begun[0] for other in begun)

    def make_group_anew(self, sink: Sink) -> None:
        """Join all ranks in a new process group, at a store of its own.

        Raises:
            SessionError: they could not be joined; only a restart helps.
        """
        store = stores.opened(self.job.rendezvous)
        parcel = pack_call(service.renew, (store.port, list(self.pids.values())), {}, "renew")
        call = self.begin(parcel, "making the process group anew", self.pids, ())
        try:
            deadline = time.monotonic() + _RENEW_SECONDS
            while call.left:
                self.show(call, sink)
                if time.monotonic() > deadline:
                    call.bring_back(0.0)
        finally:
            self.end(call)
        self._store = store
        if call.failures:
            self.broken = "the process group could not be made anew"
            raise SessionError(
                f"{self.broken}: session.restart() starts new workers, without their variables"
            )


def _grown(before: Mapping[str, int], after: Mapping[str, int] | None) -> dict[str, int]:
    """Return how many collectives each group began, those that began any."""
    counts = {name: count - before.get(name, 0) for name, count in (after or {}).items()}
    return {name: count for name, count in counts.items() if count}


def killed_line(failure: Failure) -> str:
    """Say in a line that a worker was killed because it did not come back."""
    return f"rank {failure.rank} (process {failure.pid}) did not come back and was killed"


def quiet_phases(ranks: Collection[int]) -> list[Event]:
    """Return the events that tell a sink of the ranks there are."""
    now = time.time()
    return [Phase(rank=rank, time=now, name="starting") for rank in ranks]
