"""The worker processes of one attempt on this node: forked, from a fork server, or spawned."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Final, Protocol

from ... import devices
from ...errors import LaunchError
from ...events import Event, Order, Phase
from ...stream.inbox import Channel, End, Inbox
from ...stream.wire import GO, PipeEnd
from .. import signals
from ..checks import compiler_preload, xla_runtime
from ..job import Job
from ..transfer.parent_state import ParentState
from ..worker import early, environment
from ..worker.main import WorkerSpec, main
from . import hang_report, socket_folder
from .worker_group import Attempt, Member, WorkerGroup

_PRELOAD: Final = (
    "torch",
    "torch.distributed",
    "cloudpickle",
    "tqdm.std",
    "notebook_accel.launch.worker.main",
)
OUTPUT_BY_PIPES = sys.platform != "win32"  # there it comes as events: the ends of a pipe cannot be waited for
_IMPORT_SECONDS: Final = 100.0
_GONE_SECONDS: Final = 1.0  # for what workers started, once it was killed


class WorkerProcess(Protocol):
    """What the group asks of a worker's process; those of `multiprocessing` have it."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    @property
    def sentinel(self) -> int: ...
    def join(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class WorkerEnds:
    """A worker's ends of what joins it with the notebook.

    Attributes:
        events: the socket for events and orders.
        stdout: the pipe for its output; None where that goes as events.
        stderr: likewise for its errors.
        lifeline: the pipe by which it hears that the notebook has ended.
        foreign_fds: the notebook's own descriptors, which a fork has to close.
    """

    events: socket.socket
    stdout: PipeEnd | None
    stderr: PipeEnd | None
    lifeline: PipeEnd
    foreign_fds: tuple[int, ...]


@dataclass(kw_only=True)
class _LocalMember(Member):
    """A worker process.

    Attributes:
        process: the process.
        lifeline: our end of a pipe; the worker is killed when it closes.
    """

    process: WorkerProcess
    lifeline: PipeEnd


class LocalWorkerGroup(WorkerGroup[_LocalMember]):
    """The worker processes of one attempt on this node; each leads a process group of its own.

    Args:
        attempt: the job, its start method resolved, and the ways to the run.
        payload: function and arguments, or the shared memory that holds them; None where the workers serve calls.
        environments: all variables of each worker, by global rank.
        parent_state: what the workers find of this process.
        setup: what each worker calls before the function, when all are started.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        payload: Any,
        environments: Mapping[int, Mapping[str, str]],
        parent_state: ParentState,
        setup: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(attempt)
        self._payload = payload
        self._environments = environments
        self._parent_state = parent_state
        self._setup = setup
        self._threads = environment.count_threads(self._job)
        self._inbox = Inbox()
        self._context = multiprocessing.get_context(self._job.start_method)

    # -- starting

    def start(self) -> None:
        """Start a process per rank; all are ended where one cannot start.

        None calls its function before the last one is started: what a rank does reaches threads of this process, the
        store's, and a lock that such a thread holds at a fork is held in the child for ever.

        Raises:
            OSError: the system gives no further process.
            LaunchError: there is no folder for sockets.
        """
        socket_folder.use_short_folder()
        now = time.time()
        self._delivery.deliver([Phase(rank=rank, time=now, name="starting") for rank in self._environments])
        self.start_helpers()
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        with signals.delay_interrupt(), signals.block_interrupt_in_children():
            for rank in self._environments:
                self._start_one(rank)
        self._inbox.tell_all(GO)

    def start_helpers(self) -> None:
        """Start the processes of multiprocessing that the start method needs."""
        if self._job.start_method == "forkserver":
            _preload_fork_server(self._job)
        if self._job.start_method != "fork" and sys.platform != "win32":
            resource_tracker.ensure_running()  # its start would unblock the interrupt, blocked while workers start

    def _start_one(self, rank: int) -> None:
        our_events, their_events = socket.socketpair()
        ours: dict[Channel, End] = {"events": our_events}
        theirs: dict[Channel, PipeEnd] = {}
        if OUTPUT_BY_PIPES:
            for channel in ("stdout", "stderr"):
                ours[channel], theirs[channel] = self._context.Pipe(duplex=False)
        read_end, write_end = self._context.Pipe(duplex=False)
        foreign = set(self._job.foreign_fds())
        foreign |= {*self.filenos(), write_end.fileno(), *(end.fileno() for end in ours.values())}
        their_ends = WorkerEnds(
            events=their_events,
            stdout=theirs.get("stdout"),
            stderr=theirs.get("stderr"),
            lifeline=read_end,
            foreign_fds=tuple(foreign),
        )
        try:
            process = self.start_process(rank, their_ends)
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
        if process.sentinel >= 0 and sys.platform != "win32":  # there the end of its socket tells
            self._inbox.watch(process.sentinel)
        self._members.append(
            _LocalMember(rank=rank, pid=process.pid or 0, process=process, lifeline=write_end)
        )

    def start_process(self, rank: int, ends: WorkerEnds) -> WorkerProcess:
        """Start the process of a worker.

        Args:
            rank: the worker's.
            ends: what joins it with the notebook; closed here afterwards.
        """
        forked = self._job.start_method == "fork"
        spec = WorkerSpec(
            rank=rank,
            environment=self._environments[rank],
            stdout=ends.stdout,
            stderr=ends.stderr,
            events=ends.events,
            lifeline=ends.lifeline,
            payload=self._payload,
            serve=self._job.serve,
            setup=self._setup,
            sends_value=self._sends_value(rank),
            forked=forked,
            with_ipython="IPython" in sys.modules,
            threads=self._threads,
            child_start_method=choose_child_start_method(),
            in_background=self._job.background,
            directory=self._parent_state.directory,
            random_states=self._parent_state.random_states,
            sources=self._parent_state.sources,
            foreign_fds=ends.foreign_fds if forked else (),
        )
        work: tuple[Any, ...] = (main, spec)
        if self._job.start_method == "forkserver":
            work = (early.run, ends.stderr, early.Sealed(*work))
        process: WorkerProcess = self._context.Process(  # type: ignore[attr-defined]
            target=work[0], args=work[1:], name=f"notebook_accel rank {rank}"
        )
        with _without_main_module(forked), _hear_errors(self._job.start_method, ends.stderr):
            process.start()  # type: ignore[attr-defined]
        return process

    def _sends_value(self, rank: int) -> bool:
        """Return whether the launch returns this rank's value; nodes that come and go each return their first one's."""
        place = self._job.rendezvous
        first = 0 if place.num_nodes > 1 and not place.is_elastic else min(self._environments)
        return self._job.returns == "all" or (self._job.returns == "first" and rank == first)

    # -- while they run

    def filenos(self) -> list[int]:
        """Return the notebook's descriptors that belong to these workers: forked processes must not keep them."""
        return [*self._inbox.filenos(), *(member.lifeline.fileno() for member in self._members)]

    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank; never waits, and may be called from any thread."""
        self._inbox.tell(order)

    def receive(self, timeout: float) -> Sequence[Event]:
        """Wait for events and output of all workers, `timeout` seconds at most; return what came."""
        return self._inbox.poll(timeout)

    def drain(self, rank: int) -> list[Event]:
        """Return what a worker has written so far, unfinished lines too; for whoever delivers its events only."""
        return self._inbox.drain(rank)

    def note_ends(self) -> None:
        """Note which processes have ended, and read what they left."""
        for member in self.list_running():
            if (exitcode := member.process.exitcode) is None:
                continue
            now = time.time()
            member.has_ended = True  # first: whatever happens below, nobody waits for it any more
            if member.process.sentinel >= 0 and sys.platform != "win32":
                self._inbox.unwatch(member.process.sentinel)
            self.note_end(member, exitcode, now, self._inbox.finish(member.rank))
            if member.rank not in self._record.results and member.pid:
                signals.kill_group(member.pid)  # what it started would outlive it

    # -- ending

    def send_signal(self, rank: int, signum: int) -> None:
        """Send a signal to a worker; SIGKILL goes to its process group."""
        pid = self.pids[rank]
        if signum == signals.KILL:
            signals.kill_groups([pid], ())
        else:
            signals.send(pid, signum)

    def find_state(self, rank: int) -> str:
        """Return why the process of a worker cannot go on: it is stopped, or waits in the system, or has ended."""
        return hang_report.find_process_state(self.pids[rank])

    def stop(self, grace: float, signum: int = signal.SIGINT) -> None:
        """End every worker, and all that the workers started.

        Args:
            grace: seconds that workers have to end after the signal, before they are killed; 0 kills at once.
            signum: the signal.
        """
        pids = [member.pid for member in self.list_running()]
        below = signals.descendants(pids)  # before their parents end: afterwards nobody knows whose they are
        super().stop(grace, signum)
        for pid in pids:
            signals.kill_group(pid)  # what a worker left that ended by itself
        signals.kill_groups((), below)
        signals.wait_until_ended(below, _GONE_SECONDS)

    def close(self) -> None:
        """Give back what the processes held; they must have ended."""
        self._inbox.close()
        for member in self._members:
            member.lifeline.close()
            member.process.join()
            member.process.close()
        self._members.clear()


def choose_child_start_method() -> str | None:
    """Return how workers start processes of their own: as the user chose here, else by a fork on Linux.

    A fresh process has another default than this one. With that, a data loader could not send a dataset that is
    defined in a cell: it has no importable module.

    Returns:
        A start method of `multiprocessing`; None leaves the worker's default.
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
    trained = (
        [compiler_preload.MODULE]
        if compiler_preload.is_loaded() or compiler_preload.is_needed_by(job.function)
        else []
    )
    on_xla = (
        ["torch_xla"] if job.device_kind is devices.XLA and xla_runtime.is_loaded() else []
    )  # as set up here
    modules = dict.fromkeys([*chosen, *_PRELOAD, *shell, *trained, *on_xla])
    modules.pop("__main__", None)  # the default: it would run a script again
    forkserver.set_forkserver_preload(list(modules))


@contextlib.contextmanager
def _hear_errors(start_method: str, stderr: PipeEnd | None) -> Iterator[None]:
    """Hear what a worker writes before it can send its errors here itself; where it cannot start, say why.

    A spawned process inherits this process's errors, which go into its pipe for the moment of its start.

    Args:
        start_method: how the worker starts.
        stderr: the end of its pipe for errors; None where they come as events.

    Raises:
        LaunchError: the fork server has ended.
    """
    try:
        own = os.dup(2) if start_method == "spawn" and stderr is not None else None
    except OSError:  # this process has closed its errors
        own = None
    try:
        if own is not None and stderr is not None:
            os.dup2(stderr.fileno(), 2)
        yield
    except (EOFError, ConnectionError) as error:
        if start_method != "forkserver":
            raise
        raise LaunchError(_explain_end_of_fork_server()) from error
    finally:
        if own is not None:
            os.dup2(own, 2)
            os.close(own)


def _explain_end_of_fork_server() -> str:
    """Return why the fork server has ended: its imports are made once more, in a process whose errors can be read."""
    from multiprocessing import forkserver  # not on every system

    text = "the fork server, from which workers start, has ended"
    modules = getattr(forkserver._forkserver, "_preload_modules", ())
    command = [sys.executable, "-c", "\n".join(f"import {name}" for name in modules)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_IMPORT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return text
    said = done.stderr.decode("utf-8", "backslashreplace").strip()
    return f"{text}; its imports fail here:\n{said}" if done.returncode and said else text


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
