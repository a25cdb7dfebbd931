"""The worker processes of one attempt on this node: forked, from a fork server, or spawned."""

from __future__ import annotations

import contextlib
import errno
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import psutil

from ... import interrupts, runtime
from ...errors import LaunchError
from ...events import Event, Notice, Order, Phase
from ...stream.inbox import Inbox
from ...stream.wire import GO, PipeEnd
from .. import children, descriptors, signals
from ..leftovers import Leftovers, kill_session
from ..transfer.parent_state import ParentState
from ..worker import early, environment
from ..worker.main import WorkerSpec, main
from . import fork_server, hang_report, socket_folder
from .end_watch import EndWatch, HasExitCode
from .memory_kills import MemoryKills
from .starting import FORKS_AT_ONCE, Joint, Starting, WorkerEnds
from .worker_group import Attempt, Member, WorkerGroup

_KILL_SECONDS: Final = 30.0  # the system takes a while to take down a large process
_REDIRECTING: Final = threading.Lock()
_ADVICE: Final = {
    errno.EAGAIN: "raise the limit on processes (ulimit -u, or pids.max of the control group), or start fewer",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or start fewer processes",
    errno.ENFILE: "the whole system has as many open files as it may have: close some, or start fewer processes",
    errno.ENOMEM: "the system has no memory for a further process: start fewer",
    errno.ENOSPC: "make room in the folder for temporary files, or set TMPDIR to another one",
}


class WorkerProcess(HasExitCode, Protocol):
    """What the group asks of a worker's process; those of `multiprocessing` have it."""

    def join(self) -> None: ...
    def close(self) -> None: ...


@dataclass(kw_only=True)
class _LocalMember(Member):
    """A worker process.

    Attributes:
        process: the process.
        lifeline: our end of a pipe; the worker is killed when it closes.
        end: says whether the process has ended.
        watched: the descriptor of `end` that the inbox watches; -1 for none.
    """

    process: WorkerProcess
    lifeline: PipeEnd
    end: EndWatch
    watched: int = -1


class _Prepared(NamedTuple):
    rank: int
    joint: Joint
    begin: Callable[[], WorkerProcess]


class LocalWorkerGroup(WorkerGroup[_LocalMember]):
    """The worker processes of one attempt on this node; each leads a process group of its own.

    Args:
        attempt: the job, its start method resolved, and the ways to the run.
        payload: function and arguments, or the shared memory that holds them; None where the workers serve calls.
        environments: all variables of each worker, by global rank.
        parent_state: what the workers find of this process.
        setup: what each worker calls before the function, when all are started.
    """

    kill_seconds: ClassVar[float] = _KILL_SECONDS

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
        self._number = 1  # of the worker that is prepared or started
        self._sockets = socket_folder.WorkersFolder()
        self._memory_kills = MemoryKills()
        self._leftovers = Leftovers()
        self._context = multiprocessing.get_context(self._job.start_method)
        descriptors.keep_from_forks(self)

    # -- starting

    def start(self) -> None:
        """Start a process per rank; all are ended where one cannot start.

        None calls its function before the last one is started: what a rank does reaches threads of this process, the
        store's, and a lock that such a thread holds at a fork is held in the child for ever.

        Raises:
            LaunchError: the system gives no further process or descriptor, or there is no folder for sockets.
        """
        with self._explain_lack():
            socket_folder.use_short_folder()
        now = time.time()
        self._delivery.deliver([Phase(rank=rank, time=now, name="starting") for rank in self._environments])
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]
        with self._explain_lack():
            self.start_helpers()
            with interrupts.delay_interrupt():
                try:
                    self._start_all(list(self._environments))
                except BaseException:
                    self.stop(0.0)
                    raise
        self._inbox.tell_all(GO)

    @contextlib.contextmanager
    def _explain_lack(self) -> Iterator[None]:
        """Raise LaunchError for what the system does not give: a process, a descriptor, memory."""
        try:
            yield
        except OSError as error:
            text = f"worker {self._number} of {len(self._environments)} cannot start: {error}"
            advice = _ADVICE.get(error.errno or 0, "")
            raise LaunchError(text + (f"; {advice}" if advice else "")) from error

    def start_helpers(self) -> None:
        """Start the processes of multiprocessing that the start method needs."""
        if self._job.start_method != "fork":
            # IPython's %reset deletes it, and multiprocessing reads it
            vars(sys.modules["__main__"]).setdefault("__spec__", None)
        if self._job.start_method != "fork" and sys.platform != "win32":
            resource_tracker.ensure_running()  # its start would unblock the interrupt, blocked while the others start
        if self._job.start_method == "forkserver":
            socket_folder.make_own()
            fork_server.start(self._job, self._control.check)

    def _start_all(self, ranks: Sequence[int]) -> None:
        if self._job.start_method == "fork":
            for first in range(0, len(ranks), FORKS_AT_ONCE):
                self._start_some(ranks[first : first + FORKS_AT_ONCE])
        else:
            for rank in ranks:
                self._start_fresh(rank)

    def _start_some(self, ranks: Sequence[int]) -> None:
        """Start workers.

        After a fork each page that this process writes is copied first. So all is prepared before the first fork, and
        noted after the last one.
        """
        starting, prepared = Starting(), list[_Prepared]()
        begun: list[WorkerProcess] = []
        try:
            for rank in ranks:
                self._number = len(self._members) + len(prepared) + 1
                joint = starting.join(self._context)
                prepared.append(_Prepared(rank, joint, self.prepare_process(rank, joint.theirs)))
            with interrupts.block_interrupt_in_children():
                for _, joint, begin in prepared:
                    self._number = len(self._members) + len(begun) + 1
                    starting.begins = joint
                    begun.append(begin())
        finally:
            try:
                for (rank, joint, _), process in zip(prepared, begun, strict=False):
                    self._note_start(rank, joint, process)
            finally:
                noted = {member.rank for member in self._members}
                starting.end([joint for rank, joint, _ in prepared if rank in noted])

    def _start_fresh(self, rank: int) -> None:
        """Start a worker; where its fork server was killed since it answered, by another one."""
        check = self._control.check
        watched = (
            fork_server.watch_answers()
            if self._job.start_method == "forkserver"
            else contextlib.nullcontext()
        )
        with fork_server.explain_end(self._job, check), watched:
            try:
                self._start_some([rank])
            except (EOFError, ConnectionError):
                if self._job.start_method != "forkserver":
                    raise
                fork_server.start_again(self._job, check)
                self._start_some([rank])

    def _note_start(self, rank: int, joint: Joint, process: WorkerProcess) -> None:
        self._inbox.add(rank, joint.channels)
        server = runtime.fork_server() if self._job.start_method == "forkserver" else None
        member = _LocalMember(
            rank=rank,
            pid=process.pid or 0,
            process=process,
            lifeline=joint.lifeline,
            end=EndWatch(process, server),
        )
        self._watch(member, member.end.fd)  # on Windows there is none, and the end of its socket tells
        self._members.append(member)

    def prepare_process(self, rank: int, ends: WorkerEnds) -> Callable[[], WorkerProcess]:
        """Return what starts the process of a worker, and returns it.

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
            child_start_method=children.choose_start_method(),
            in_background=self._job.background,
            directory=self._parent_state.directory,
            random_states=self._parent_state.random_states,
            sources=self._parent_state.sources,
        )
        sealed = early.Sealed(main, spec)
        # a spawned one has it from the start, see _hear_errors
        stderr = ends.stderr if self._job.start_method == "forkserver" else None
        process = self._context.Process(  # type: ignore[attr-defined]
            target=main if forked else early.run,
            args=(spec,) if forked else (stderr, sealed),
            name=f"{early.NAME} {rank}",
        )
        self._sockets.assign(process)
        heard = ends.stderr if self._job.start_method == "spawn" else None
        return functools.partial(_begin, process, sealed, heard, forked=forked)

    def _sends_value(self, rank: int) -> bool:
        """Return whether the launch returns this rank's value; nodes that come and go each return their first one's."""
        place = self._job.rendezvous
        first = 0 if place.num_nodes > 1 and not place.is_elastic else min(self._environments)
        return self._job.returns == "all" or (self._job.returns == "first" and rank == first)

    # -- while they run

    def filenos(self) -> list[int]:
        """Return the descriptors that join this process with the workers; no forked process may keep them."""
        fds = self._inbox.filenos()
        for member in list(self._members):
            with contextlib.suppress(OSError):  # it is closed
                fds.append(member.lifeline.fileno())
        return fds

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
        looked = time.monotonic()  # of all alike: ends that this pass notices have no order
        for member in self.list_running():
            has_ended = member.end.has_ended()
            self._watch(member, member.end.fd)
            if not has_ended:
                member.alive = looked
                continue
            now = time.time()
            self._leave_alone(member)
            if member.pid:
                self._leftovers.end(member.pid)  # what it started would outlive it, and write for ever
            self.note_end(member, member.end.exitcode, now, self._inbox.finish(member.rank))
        self._leftovers.look()

    def find_killer(self) -> str:
        """Return whether the system has killed processes for want of memory; empty where it counts none."""
        return self._memory_kills.explain()

    def _leave_alone(self, member: _LocalMember) -> None:
        member.has_ended = True  # first: whatever happens below, nobody waits for it any more
        self._watch(member, -1)

    def _watch(self, member: _LocalMember, fd: int) -> None:
        """Let the inbox watch this descriptor for the end of a member; -1 for none."""
        if fd == member.watched:
            return
        if member.watched >= 0:
            self._inbox.unwatch(member.watched)
        member.watched = fd
        if fd >= 0:
            self._inbox.watch(fd)

    # -- ending

    def send_signal(self, rank: int, signum: int) -> None:
        """Send a signal to a worker; what it started is ended after it."""
        signals.send(self.pids[rank], signum)

    def find_state(self, rank: int) -> str:
        """Return why the process of a worker cannot go on: it is stopped, or waits in the system, or has ended."""
        return hang_report.find_process_state(self.pids[rank])

    def stop(self, grace: float, signum: int = signal.SIGINT) -> None:
        """End every worker, and all that the workers started.

        Args:
            grace: seconds that workers have to end after the signal, before they are killed; 0 kills at once.
            signum: the signal.
        """
        below: list[psutil.Process] = []
        if sys.platform == "win32":  # which has no sessions: afterwards nobody knows whose they are
            below = signals.descendants([member.pid for member in self.list_running()])
        super().stop(grace, signum)
        signals.kill_all(below)
        self._leftovers.finish()

    @property
    def has_leftovers(self) -> bool:
        """Whether something runs that an ended worker has started; `poll` ends it."""
        return bool(self._leftovers)

    def abandon(self, member: _LocalMember) -> None:
        """Note that a worker was killed and does not end: nobody waits for it any more."""
        self._leave_alone(member)
        kill_session(member.pid)  # what it started does end
        text = (
            f"rank {member.rank} (process {member.pid}) was killed and has not ended: "
            f"{signals.describe_state(member.pid)}. It is left behind"
        )
        self._delivery.deliver([Notice(rank=-1, time=time.time(), text=text)])

    def close(self) -> None:
        """Give back what the processes held; `stop` has ended them."""
        self._leftovers.finish()
        descriptors.forget(self)
        self._inbox.close()
        for member in self._members:
            member.lifeline.close()
            member.end.close()
            if member.end.exitcode is not None:
                member.process.join()
                member.process.close()
            else:  # nobody waits for it at exit either
                multiprocessing.process._children.discard(member.process)  # type: ignore[attr-defined]
        self._members.clear()
        self._sockets.remove()


def _begin(process: Any, sealed: early.Sealed, stderr: PipeEnd | None, *, forked: bool) -> WorkerProcess:
    """Start a process of multiprocessing, and return it.

    Args:
        process: it.
        sealed: what a fresh one does.
        stderr: as for `_hear_errors`.
        forked: whether it is a fork.
    """
    with contextlib.closing(sealed), _without_main_module(forked), _hear_errors(stderr):
        process.start()
    started: WorkerProcess = process
    return started


@contextlib.contextmanager
def _hear_errors(stderr: PipeEnd | None) -> Iterator[None]:
    """Hear what a worker writes before it can send its errors here itself.

    A spawned process inherits this process's errors, which go into its pipe for the moment of its start. The workers of
    a fork server do this themselves.

    Args:
        stderr: the end of the pipe for the errors of a spawned one; None for others, and where they come as events.
    """
    if stderr is None:
        yield
        return
    with _REDIRECTING:  # another thread may start workers too
        try:
            own = os.dup(2)
        except OSError:  # this process has closed its errors
            yield
            return
        try:
            os.dup2(stderr.fileno(), 2)
            yield
        finally:
            os.dup2(own, 2)
            os.close(own)


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
