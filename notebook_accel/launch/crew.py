"""The worker processes of one attempt on this node: started, watched, stopped."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Literal

from .. import devices
from ..events import Event, Failure, Order
from ..stream.inbox import Channel, End, Inbox
from ..stream.record import RunRecord
from ..stream.wire import GO, PipeEnd
from . import chips, compiler, registry, signals
from .agreement import Agreement
from .control import Control
from .delivery import Delivery
from .hanging import HangWatch
from .job import Job
from .surroundings import Surroundings
from .worker import Seat, main

State = Literal["running", "done", "failed", "stopped", "hung"]

_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "tqdm.std", "notebook_accel.launch.worker"]
OUTPUT_BY_PIPES = sys.platform != "win32"  # there it comes as events: the ends of a pipe cannot be waited for
_LAST_WORDS = 0.1
_LOOK_SECONDS = 0.1


@dataclass(kw_only=True)
class _Member:
    rank: int
    process: multiprocessing.process.BaseProcess
    lifeline: PipeEnd
    ended: bool = False


class Crew:
    """The processes of one attempt.

    Args:
        job: what to run, its start method resolved.
        payload: function and arguments, or the segment that holds them.
        record: says which ranks sent a result or failure.
        deliver: takes the events as they come: it applies them to the record and shows them. It is called
            several times a second also where there are none.
        control: says when the run is to stop.
        prepare: what each worker calls before the function, when all are started.

    Attributes:
        stopped_ranks: those that were ended from here.
        hang_watch: notices that nothing goes on any more.
        hang: what was told where nothing went on any more, and the run is to end for it.
    """

    def __init__(
        self,
        job: Job,
        payload: Any,
        record: RunRecord,
        deliver: Callable[[Sequence[Event]], None],
        control: Control,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._job = job
        self._payload = payload
        self._record = record
        self._deliver = Delivery(deliver, record)
        self._inbox = Inbox()
        self._members: list[_Member] = []
        self._context = multiprocessing.get_context(job.start_method)
        self.stopped_ranks: set[int] = set()
        self._prepare = prepare
        self._agreement = Agreement(self._inbox, record, control)
        self.hang_watch = HangWatch(job.hang_timeout, self.tell, deliver, self._send)
        self.hang = ""

    def start(
        self,
        environments: Mapping[int, Mapping[str, str]],
        threads: int | None,
        surroundings: Surroundings,
    ) -> None:
        """Start a process per rank with its environment; all are stopped where one cannot start.

        None calls its function before the last one is started: what a rank does reaches threads of this process, the
        store's, and a lock that such a thread holds at a fork is held in the child for ever.
        """
        if self._job.start_method == "forkserver":
            _preload_fork_server(self._job)
        if self._job.start_method != "fork" and sys.platform != "win32":
            resource_tracker.ensure_running()  # its start would unblock the interrupt below
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        place = self._job.rendezvous
        first = 0 if place.num_nodes > 1 and not place.is_elastic else min(environments)  # or it is passed on
        with signals.interrupt_held(), signals.blocked_in_children():
            for rank, environment in environments.items():
                sends_value = self._job.returns == "all" or (self._job.returns == "first" and rank == first)
                self._start_one(rank, environment, threads, sends_value, surroundings)
        self._inbox.tell_all(GO)

    def _start_one(
        self,
        rank: int,
        environment: Mapping[str, str],
        threads: int | None,
        sends_value: bool,
        surroundings: Surroundings,
    ) -> None:
        forked = self._job.start_method == "fork"
        our_events, their_events = socket.socketpair()
        ours: dict[Channel, End] = {"events": our_events}
        theirs: dict[Channel, PipeEnd] = {}
        if OUTPUT_BY_PIPES:
            for channel in ("stdout", "stderr"):
                ours[channel], theirs[channel] = self._context.Pipe(duplex=False)
        read_end, write_end = self._context.Pipe(duplex=False)
        foreign = {fd for session in registry.sessions() for fd in session.filenos()}
        foreign |= {*self.filenos(), write_end.fileno(), *(end.fileno() for end in ours.values())}
        seat = Seat(
            rank=rank,
            environment=environment,
            stdout=theirs.get("stdout"),
            stderr=theirs.get("stderr"),
            events=their_events,
            lifeline=read_end,
            payload=self._payload,
            serve=self._job.serve,
            prepare=self._prepare,
            sends_value=sends_value,
            forked=forked,
            with_ipython="IPython" in sys.modules,
            threads=threads,
            child_start_method=child_start_method(),
            in_background=self._job.background,
            directory=surroundings.directory,
            random_states=surroundings.random_states,
            sources=surroundings.sources,
            foreign_fds=tuple(foreign) if forked else (),
        )
        process = self._context.Process(target=main, args=(seat,), name=f"notebook_accel rank {rank}")  # type: ignore[attr-defined]
        try:
            with _without_main_module(forked):
                process.start()
        except BaseException:
            for end in (*ours.values(), write_end):
                end.close()
            self.stop(0.0)
            raise
        finally:
            given: list[End] = [their_events, *theirs.values(), read_end]
            for end in given:
                end.close()
        self._inbox.add(rank, ours)
        if sys.platform != "win32":  # there the end of its socket tells
            self._inbox.watch(process.sentinel)
        self._members.append(_Member(rank=rank, process=process, lifeline=write_end))

    @property
    def pids(self) -> dict[int, int]:
        """Return the process ids by rank."""
        return {member.rank: member.process.pid or 0 for member in self._members}

    @property
    def is_running(self) -> bool:
        """Whether any of them has not ended."""
        return bool(self._running())

    def filenos(self) -> list[int]:
        """Return the notebook's descriptors that belong to these workers: forked processes must not keep them."""
        return [*self._inbox.filenos(), *(member.lifeline.fileno() for member in self._members)]

    def poll(self, timeout: float) -> None:
        """Deliver what comes within `timeout` seconds; returns as soon as something did."""
        self._poll(timeout)

    def tell(self, order: Order) -> None:
        """Send an order; never waits, and may be called from any thread."""
        self._inbox.tell(order)

    def drain(self, rank: int) -> list[Event]:
        """Return what a worker has written so far, unfinished lines too; for `deliver` only."""
        return self._inbox.drain(rank)

    def watch(self, timeout: float) -> State:
        """Deliver what comes within `timeout` seconds, or until the attempt ends; say how it stands."""
        deadline = time.monotonic() + timeout
        while True:
            self._poll(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
            if self._record.failures:
                return "failed"
            if not self._running():
                return "done"
            if self._agreement.is_time(member.rank for member in self._running()):
                return "stopped"
            if self._hangs():
                return "hung"
            if time.monotonic() >= deadline:
                return "running"

    def _send(self, rank: int, signum: int) -> None:
        signals.send(self.pids[rank], signum)

    def _hangs(self) -> bool:
        """Tell where nothing goes on any more; whether the run is to end for it."""
        running = {member.rank: member.process.pid or 0 for member in self._running()}
        phases = self._record.phases
        started = {rank for rank in running if rank in phases and phases[rank].name == "running"}
        text = self.hang_watch.look(running, started, list(self._record.results))
        self.hang = text if self._job.on_hang == "raise" else ""
        return bool(self.hang)

    def settle(self) -> None:
        """After a failure: hear the last words of ranks that end of themselves, then end the others."""
        deadline = time.monotonic() + _LAST_WORDS
        while self._running() and time.monotonic() < deadline:
            self._poll(_LAST_WORDS / 5)
        self.stop(1.0, signal.SIGTERM)

    def stop(self, grace: float, signum: int = signal.SIGINT) -> None:
        """End every worker and all that they started.

        Args:
            grace: seconds that workers have to end after `signum`, before they are killed.
        """
        self._deliver.begin_to_stop()
        running = self._running()
        pids = [member.process.pid for member in running if member.process.pid]
        below = signals.descendants(pids)
        self.stopped_ranks.update(member.rank for member in running)
        if grace > 0:
            for pid in pids:
                signals.send(pid, signum)
        deadline = time.monotonic() + grace
        while self._running() and time.monotonic() < deadline:
            self._poll(0.02)
        signals.kill_groups(pids, below)
        while self._running():
            self._poll(0.05)
        signals.wait_gone(below, 1.0)

    def close(self) -> None:
        """Give back what the processes held; they must have ended."""
        self._inbox.close()
        for member in self._members:
            member.lifeline.close()
            member.process.join()
            member.process.close()
        self._members.clear()

    def _running(self) -> list[_Member]:
        return [member for member in self._members if not member.ended]

    def _poll(self, timeout: float) -> None:
        events = self._inbox.poll(timeout)
        self.hang_watch.take(events)
        self._deliver(events)
        for member in self._running():
            if member.process.exitcode is not None:
                self._end(member)

    def _end(self, member: _Member) -> None:
        """Read what an ended process left, and note where it ended without a word."""
        now = time.time()
        member.ended = True
        if sys.platform != "win32":
            self._inbox.unwatch(member.process.sentinel)
        self._deliver(self._inbox.finish(member.rank))
        if not self._deliver.has_ended(member.rank) and member.rank not in self.stopped_ranks:
            failure = Failure(
                rank=member.rank, time=now, pid=member.process.pid or 0, exitcode=member.process.exitcode
            )
            self._deliver([failure])
        if member.rank not in self._record.results and member.process.pid:
            signals.kill_group(member.process.pid)  # what it started would outlive it


def child_start_method() -> str | None:
    """Return how workers start processes of their own: as the user chose here, else by a fork where there is one.

    A fresh process would take its own start method for the default, and a data loader could not send a dataset that
    is defined in a cell: it has no importable module.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return chosen or ("fork" if sys.platform == "linux" else None)


def _preload_fork_server(job: Job) -> None:
    """Have the fork server, when it starts, import what the user told it to and what every worker needs.

    It starts once in a kernel: where the kernel has torch's compiler, a later launch is taken to need it.
    """
    from multiprocessing import forkserver  # not on every system

    chosen = getattr(forkserver._forkserver, "_preload_modules", ())
    shell = ["IPython.core.interactiveshell"] if "IPython" in sys.modules else []
    trained = [compiler.MODULE] if compiler.is_loaded() or compiler.needed_by(job.function) else []
    on_xla = ["torch_xla"] if job.device_kind is devices.XLA and chips.is_loaded() else []  # as set up here
    modules = dict.fromkeys([*chosen, *_PRELOAD, *shell, *trained, *on_xla])
    modules.pop("__main__", None)  # the default: it would run a script again
    forkserver.set_forkserver_preload(list(modules))


@contextlib.contextmanager
def _without_main_module(forked: bool) -> Iterator[None]:
    """Keep a fresh process from running the script that launched it again: functions travel by value.

    A notebook's own module is no script, and other threads go on with it.
    """
    script = sys.modules["__main__"]
    is_script = getattr(script, "__spec__", None) is not None or hasattr(script, "__file__")
    if forked or not is_script:
        yield
        return
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
