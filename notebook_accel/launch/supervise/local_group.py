"""The worker processes of one attempt on this node: forks of this process, or started by its agent."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe, connection, process, resource_tracker
from typing import Any, ClassVar, Final, Protocol

import torch.multiprocessing

from ... import interrupts
from ...errors import LaunchError
from ...events import Event, Failure, Notice, Order, Phase, Result
from ...stream.inbox import Channel, End, Inbox
from ...stream.readable import wait_readable
from ...stream.wire import GO
from .. import children, descriptors, signals
from ..agent import client
from ..agent.orders import WorkerOrder
from ..agent.parent_state import ParentState
from ..agent.worker import FreshWorker
from ..checks import patches
from ..leftovers import Leftovers, kill_session, make_sockets_folder
from ..memory_kills import MemoryKills
from ..script import Script
from ..transfer.shared_memory import SharedPickle
from ..worker import environment
from ..worker.main import WorkerEnds, WorkerSpec, main
from . import hang_report
from .worker_group import Attempt, Member, WorkerGroup

SCRIPT_GRACE_SECONDS: Final = 30.0
"""How long scripts have to end after a signal, as under torch elastic: they may save what they have."""
_KILL_SECONDS: Final = 30.0  # the system takes a while to take down a large process
_LOOK_SECONDS: Final = 0.05
_STOPPED_SECONDS: Final = 0.5  # longer than a look of a debugger takes
_NOTHING: Final = pickle.dumps(None)
_ADVICE: Final = {
    errno.EAGAIN: "raise the limit on processes (ulimit -u, or pids.max of the control group), or start fewer",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or start fewer processes",
    errno.ENFILE: "the whole system has as many open files as it may have: close some, or start fewer processes",
    errno.ENOMEM: "the system has no memory for a further process: start fewer",
    errno.ENOSPC: "make room in the folder for temporary files, or set TMPDIR to another one",
}


class _Process(Protocol):
    """The process of a worker, whoever has started it.

    Attributes:
        pid: 0 before it has started.
        exitcode: negative for a signal; None while it runs, and where nobody knows it.
    """

    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int | None: ...
    def fileno(self) -> int:
        """Return the descriptor that can be read when `look` has news."""

    def look(self) -> bool:
        """Return whether it has ended."""

    def close(self) -> None:
        """Give back what it holds."""


class _Fork:
    """A process that was forked from this one.

    Args:
        forked: the process, just started.
    """

    def __init__(self, forked: Any) -> None:
        self._process = forked
        self.pid: int = forked.pid
        self.exitcode: int | None = None
        self._pidfd = -1
        if sys.platform == "linux":
            with contextlib.suppress(AttributeError, OSError):  # an old system, or a sandbox
                self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd if self._pidfd >= 0 else int(self._process.sentinel)

    def look(self) -> bool:
        has_ended = wait_readable(self.fileno(), 0)  # first: of one that ends now the code is known later
        self.exitcode = self._process.exitcode  # None where other code has waited for it
        return has_ended or self.exitcode is not None

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
        if self.exitcode is not None:
            self._process.close()
        else:  # nobody knows how it ended, or it does not end
            children.forget(self._process)


@dataclass(kw_only=True)
class _LocalMember(Member):
    """A worker process.

    Attributes:
        process: the process.
        joint: what joins it with this process.
    """

    process: _Process
    joint: _Joint


class _Joint:
    """What joins one worker with this process: its own ends go to the worker and are closed here then.

    Raises:
        OSError: the system gives no further descriptor; none is left open.
    """

    def __init__(self) -> None:
        self._forking: int | None = None  # the thread that forks the worker
        self._ends: list[Any] = []
        self._theirs: list[Any] = []
        try:
            self.events, their_events = self._note(socket.socketpair())
            their_events.setblocking(True)  # a cell may have set a default timeout
            self.stdout, their_stdout = self._note(Pipe(duplex=False))
            self.stderr, their_stderr = self._note(Pipe(duplex=False))
            self.lifeline, their_lifeline = self._note(Pipe(duplex=False)[::-1])
        except BaseException:
            self.close()
            raise
        self.theirs = WorkerEnds(
            events=their_events, stdout=their_stdout, stderr=their_stderr, lifeline=their_lifeline.fileno()
        )
        descriptors.keep_from_forks(self)

    def _note(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        self._ends.append(pair[0])
        self._theirs.append(pair[1])
        return pair

    @property
    def channels(self) -> dict[Channel, End]:
        """Our ends of what the worker sends; the inbox closes them."""
        return {"events": self.events, "stdout": self.stdout, "stderr": self.stderr}

    def filenos(self) -> list[int]:
        """Return the descriptors that no process keeps that is forked now, but the worker its own."""
        theirs = [] if self._forking == threading.get_ident() else self._theirs
        return [fd for end in (*self._ends, *theirs) if (fd := _find_fd(end)) >= 0]

    @contextlib.contextmanager
    def forking(self) -> Iterator[None]:
        """Let what this thread forks in the block keep the worker's ends."""
        self._forking = threading.get_ident()
        try:
            yield
        finally:
            self._forking = None

    def close_theirs(self) -> None:
        """Close the worker's ends: it has its own copies."""
        while self._theirs:  # none is in the list once it is closed: another thread may fork in between
            self._theirs.pop().close()

    def close(self) -> None:
        """Close all."""
        descriptors.forget(self)
        self.close_theirs()
        while self._ends:
            self._ends.pop().close()


def _find_fd(end: Any) -> int:
    """Return the descriptor of a socket or pipe, -1 where the inbox has closed it."""
    try:
        return int(end.fileno())
    except OSError:
        return -1


class LocalWorkerGroup(WorkerGroup[_LocalMember]):
    """The worker processes of one attempt on this node; each leads a session of its own.

    A script's ranks are fresh interpreters that do nothing else, where the engine has nothing to set up in them. Their
    exit codes say how they ended, as without a launcher: a script returns nothing.

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
        self._is_first = attempt.number == 0
        self._threads = environment.count_threads(self._job)
        self._inbox = Inbox()
        self._sockets = make_sockets_folder()
        self._memory_kills = MemoryKills()
        self._leftovers = Leftovers()
        descriptors.keep_from_forks(self)
        self._is_forked = self._job.start_method == "fork"
        function = self._job.function
        self._script = function if isinstance(function, Script) and not (self._is_forked or setup) else None

    # -- starting

    def start(self) -> None:
        """Start a process per rank; all are ended where one cannot start.

        None calls its function before the last one is started: what a rank does reaches threads of this process, the
        store's, and a lock that such a thread holds at a fork is held in the child for ever.

        Raises:
            LaunchError: the system gives no further process or descriptor.
        """
        now = time.time()
        self._delivery.deliver([Phase(rank=rank, time=now, name="starting") for rank in self._environments])
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) if self._is_forked else ():
            with contextlib.suppress(Exception):
                stream.flush()  # type: ignore[union-attr]  # else each fork would write it too
        with interrupts.delay_interrupt():
            try:
                with self._explain_lack():
                    self._start_all()
                self._name_patches()
                self._wait_for_starts()
            except BaseException:
                self.stop(0.0)
                raise
        self._inbox.tell_all(GO)
        if self._script is not None:
            now = time.time()
            pids = self.pids.items()
            self._delivery.deliver(
                [Phase(rank=rank, time=now, name="running", pid=pid) for rank, pid in pids]
            )

    def _name_patches(self) -> None:
        """Say what fresh workers lack of this process, while they start."""
        if self._is_first and (text := patches.describe(self._job)):
            self._delivery.deliver([Notice(rank=-1, time=time.time(), text=text)])

    @contextlib.contextmanager
    def _explain_lack(self) -> Iterator[None]:
        """Raise LaunchError for what the system does not give: a process, a descriptor, memory."""
        try:
            yield
        except OSError as error:
            raise self._make_lack(error, len(self._members) + 1) from error

    def _make_lack(self, error: OSError, number: int) -> LaunchError:
        text = f"worker {number} of {len(self._environments)} cannot start: {error}"
        advice = _ADVICE.get(error.errno or 0, "")
        return LaunchError(text + (f"; {advice}" if advice else ""))

    def _start_all(self) -> None:
        """Start workers.

        After a fork each page that this process writes is copied first. So all is prepared before the first fork, and
        noted after the last one.
        """
        joints: list[_Joint] = []
        started: list[_Process] = []
        try:
            for _ in self._environments:
                joints.append(_Joint())
            specs = [self._make_spec(rank) for rank in self._environments]
            start = self._fork if self._is_forked else self._order
            for spec, joint in zip(specs, joints, strict=True):
                started.append(start(spec, joint))
        finally:
            for rank, joint, begun in zip(self._environments, joints, started, strict=False):
                self._inbox.add(rank, joint.channels)
                self._inbox.watch(begun.fileno())
                self._members.append(_LocalMember(rank=rank, pid=begun.pid, process=begun, joint=joint))
                joint.close_theirs()
            for joint in joints[len(started) :]:
                joint.close()

    def _fork(self, spec: WorkerSpec, joint: _Joint) -> _Process:
        """Fork this process."""
        forked = torch.multiprocessing.get_context("fork").Process(
            target=main, args=(spec, joint.theirs, self._payload), name=f"notebook_accel rank {spec.rank}"
        )
        with joint.forking(), interrupts.block_interrupt_in_children():
            forked.start()
        return _Fork(forked)

    def _order(self, spec: WorkerSpec, joint: _Joint) -> _Process:
        """Order a worker of this process's agent."""
        state, ends = self._parent_state, joint.theirs
        fds = [ends.events.fileno(), ends.stdout.fileno(), ends.stderr.fileno()]
        pickled = b""
        if self._script is None:
            tracker: Any = resource_tracker.getfd()
            fds.append(tracker)
            memory = self._payload
            if isinstance(memory, SharedPickle):
                fds += memory.filenos()
            fresh = FreshWorker(
                spec=spec,
                memory=None if memory is None else memory.layout,
                authkey=bytes(process.current_process().authkey),
            )
            pickled = pickle.dumps(fresh)
        else:
            with contextlib.suppress(OSError):  # this process has closed it
                os.fstat(0)
                fds.append(0)
        order = WorkerOrder(
            rank=spec.rank,
            environment=spec.environment,
            directory=state.directory or os.sep,
            limits=state.limits,
            imports=state.imports,
            command=(self._script.kind, *self._script.words) if self._script is not None else (),
            work=pickled,
            num_fds=len(fds) + 2,
        )
        return client.order(order, fds)

    def _make_spec(self, rank: int) -> WorkerSpec:
        return WorkerSpec(
            rank=rank,
            environment=self._environments[rank],
            serve=self._job.serve,
            setup=self._setup,
            sends_value=self._sends_value(rank),
            forked=self._is_forked,
            with_ipython=self._parent_state.with_ipython,
            threads=self._threads,
            child_start_method=self._parent_state.child_start_method,
            in_background=self._job.background,
            directory=self._parent_state.directory,
            settings=self._parent_state.settings,
            sources=self._parent_state.sources,
            sockets=self._sockets,
        )

    def _wait_for_starts(self) -> None:
        """Wait until all workers have process ids: an agent may still have to import what they need.

        Raises:
            LaunchError: one cannot start, or the agent has ended or is stopped.
        """
        looked = time.monotonic()
        while waiting := [member for member in self._members if not member.pid]:
            connection.wait([member.process.fileno() for member in waiting], _LOOK_SECONDS)
            for member in waiting:
                ended = member.process.look()
                member.pid = member.process.pid
                if ended and not member.pid:
                    self._raise_no_start(member)
            self._control.check()
            interrupts.obey_interrupt()
            if time.monotonic() - looked > _STOPPED_SECONDS:
                looked = time.monotonic()
                _check_that_it_goes_on(waiting[0].process)

    def _raise_no_start(self, member: _LocalMember) -> None:
        begun = member.process
        assert isinstance(begun, client.AgentWorker)
        if begun.error:
            error = OSError(begun.error, os.strerror(begun.error))
            raise self._make_lack(error, self._members.index(member) + 1)
        raise LaunchError(begun.problem)

    def _sends_value(self, rank: int) -> bool:
        """Return whether the launch returns this rank's value."""
        first = 0 if self._job.rendezvous.num_nodes > 1 else min(self._environments)
        return self._job.returns == "all" or (self._job.returns == "first" and rank == first)

    # -- while they run

    def filenos(self) -> list[int]:
        """Return the descriptors by which this process hears workers; no forked process may keep them."""
        return [*self._inbox.filenos(), *(member.process.fileno() for member in self._members)]

    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank; never waits, and may be called from any thread."""
        self._inbox.tell(order)

    def receive(self, timeout: float) -> Sequence[Event]:
        """Wait for events and output of all workers, `timeout` seconds at most; return what came."""
        return self._inbox.poll(timeout)

    def note_ends(self) -> None:
        """Note which processes have ended, and read what they left."""
        looked = time.monotonic()  # of all alike: ends that this pass notices have no order
        for member in self.list_running():
            if not member.process.look():
                member.alive = looked
                continue
            now = time.time()
            self._leave_alone(member)
            if member.pid:
                self._leftovers.end(member.pid)  # what it started would outlive it, and write for ever
            self.note_end(member, member.process.exitcode, now, self._inbox.finish(member.rank))
        self._leftovers.look()

    def can_be_asked(self, rank: int) -> bool:
        """Return whether a script has begun: before, the signal that shows its stack would end it."""
        if self._script is None or signals.STACK_SIGNAL is None:
            return True
        return signals.is_caught(self.pids[rank], signals.STACK_SIGNAL)

    def judge_end(self, member: Member, exitcode: int | None, at: float) -> Event:
        """Return what it means that a process has ended: a script need not say that all is well."""
        if self._script is not None and exitcode == 0:
            return Result(rank=member.rank, time=at, value=_NOTHING)
        failure = super().judge_end(member, exitcode, at)
        if exitcode is None and isinstance(begun := self._member(member.rank).process, client.AgentWorker):
            assert isinstance(failure, Failure)
            return replace(failure, lost=begun.agent.explain_end())
        return failure

    def find_killer(self) -> str:
        """Return whether the system has killed processes for want of memory; empty where it counts none."""
        return self._memory_kills.explain()

    def _leave_alone(self, member: _LocalMember) -> None:
        member.has_ended = True  # first: whatever happens below, nobody waits for it any more
        self._inbox.unwatch(member.process.fileno())

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
            signum: the signal. Scripts get the one that ends the launcher, else SIGTERM, and `SCRIPT_GRACE_SECONDS`.
        """
        for member in self.list_running():
            if not member.pid:  # the agent starts it later: nobody lets it begin then
                self._leave_alone(member)
        if self._script is not None:
            grace = SCRIPT_GRACE_SECONDS if grace > 0 else 0.0
            signum = self._control.signum or signal.SIGTERM
        super().stop(grace, signum)
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
            member.joint.close()
            member.process.close()
        self._members.clear()


def _check_that_it_goes_on(ordered: _Process) -> None:
    """Raise LaunchError where the agent of a worker that has not started is stopped."""
    assert isinstance(ordered, client.AgentWorker)  # forks have started
    agent = ordered.agent
    if agent.is_stopped:
        state = hang_report.find_process_state(agent.pid)
        raise LaunchError(f"the agent, from which workers start, is process {agent.pid}, which {state}")
