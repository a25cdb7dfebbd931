"""This process's agent, as the notebook knows it: started at need, asked for workers, told how they end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ... import environ, interrupts, runtime
from ...stream.readable import wait_readable
from ...takeover import finder
from .. import children, descriptors, process_table
from ..transfer.shared_memory import write_unnamed
from . import orders
from .modules import read_by_imports
from .orders import ImportOrder, WorkerOrder

IDLE_SECONDS: Final = 600.0
"""After which an agent ends that has no orders and no workers."""
_START: Final = (
    "import sys; sys.path[:] = {path!r}; from notebook_accel.launch.agent.server import main; "
    "main(with_ipython={with_ipython}, background={background}, idle_seconds={seconds})"
)
_PACKAGE: Final = str(Path(__file__).parents[3])
_SEND_SECONDS: Final = 60.0
_END_SECONDS: Final = 0.2  # from the end of its descriptors to that of its process
_LOOK_SECONDS: Final = 0.01
_FIRST_FD: Final = 10  # above those that the agent finds its own by
_MOST_WORDS: Final = 1 << 12
_MOST_SAID: Final = 2000


class AgentWorker:
    """A worker that was ordered.

    Args:
        agent: starts it, and ends it where nobody has this any more.
        status: our end of its status pipe.

    Attributes:
        pid: its process id, 0 before it has started.
        exitcode: how it ended, negative for a signal; None before, and where it ended with its agent.
        error: an errno, where the system gave no process; else 0.
        has_ended: whether it has ended, or there never was one.
    """

    def __init__(self, agent: Agent, status: int) -> None:
        self.agent = agent
        self.pid = 0
        self.exitcode: int | None = None
        self.error = 0
        self.has_ended = False
        self._status = status

    def fileno(self) -> int:
        """Return the descriptor that can be read when `look` has news."""
        return self._status

    def look(self) -> bool:
        """Read what the agent tells of the worker; return whether it has ended."""
        while not self.has_ended and wait_readable(self._status, 0):
            data = os.read(self._status, orders.STATUS.size)
            what, number = orders.STATUS.unpack(data) if data else (orders.ENDED, None)
            if what == orders.STARTED:
                self.pid = number
            elif what == orders.FAILED:
                self.error, self.has_ended = number, True
            else:
                self.exitcode, self.has_ended = number, True
        return self.has_ended

    @property
    def problem(self) -> str:
        """Why there is no process; empty where there is one, or may be soon."""
        if self.pid or not self.has_ended:
            return ""
        if self.error:
            return os.strerror(self.error)
        return self.agent.explain_end()

    def close(self) -> None:
        """Give back what it holds."""
        os.close(self._status)


Begin = Callable[[int, int, int], int]
"""Starts the process of an agent, with its log, its connection and the end of its lifeline; returns its process id."""


class Agent:
    """A process that starts workers.

    Args:
        begin: starts the process.
        variables: of its environment.

    Raises:
        OSError: the system gives no process or descriptor.

    Attributes:
        pid: its process id.
    """

    def __init__(self, begin: Begin, variables: Mapping[str, str]) -> None:
        self._owner = os.getpid()
        self._sending = threading.Lock()
        self._num_waiting = 0
        self._is_retired = False
        self._is_reaped = True  # there is no process yet
        self._lifeline = -1
        self._variables = read_by_imports(variables)
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            self._log = write_unnamed(b"")
            ours.callback(os.close, self._log)
            self._connection, other = map(ours.enter_context, socket.socketpair())
            self._connection.settimeout(_SEND_SECONDS)
            other.setblocking(True)  # a cell may have set a default timeout
            end, self._lifeline = os.pipe()
            ours.pop_all()
            ours.callback(self.end)
            theirs.callback(os.close, end)
            theirs.enter_context(other)
            descriptors.keep_from_forks(self)
            self.pid = begin(self._log, other.fileno(), end)
            self._is_reaped = False
            ours.pop_all()

    def filenos(self) -> list[int]:
        """Return the descriptors that no process keeps that is forked from this one."""
        return [self._lifeline, *([] if self._is_retired else [self._connection.fileno()])]

    @property
    def is_usable(self) -> bool:
        """Whether it runs, is this process's, and has read the variables that this process has."""
        variables = read_by_imports(finder.complete_variables(environ.snapshot()))
        is_open = self._owner == os.getpid() and not self._is_retired and not self.has_ended
        return is_open and variables == self._variables

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""
        try:
            self._is_reaped = self._is_reaped or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # other code has waited for it
            self._is_reaped = True
        return self._is_reaped

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return process_table.find_state(self.pid) in ("stopped", "tracing-stop")

    @property
    def is_ready(self) -> bool:
        """Whether it has imported all that it was told to."""
        while self._num_waiting and wait_readable(self._connection.fileno(), 0):
            if not (said := self._connection.recv(_MOST_WORDS)):
                return False
            self._num_waiting -= len(said)
        return self._num_waiting == 0

    def start_worker(self, order: WorkerOrder, fds: Sequence[int]) -> AgentWorker:
        """Order a worker; does not wait for it.

        Args:
            order: what it does.
            fds: its descriptors, from `events` on.

        Raises:
            OSError: the agent has ended, or the system has no memory or descriptor.
        """
        status, theirs = os.pipe()
        try:
            self._send(order, [theirs, *fds])
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(theirs)
        return AgentWorker(self, status)

    def import_ahead(self, order: ImportOrder) -> None:
        """Let it import what workers will need.

        Raises:
            OSError: it has ended, or the system has no memory or descriptor.
        """
        self._send(order)
        self._num_waiting += 1

    def _send(self, order: object, fds: Sequence[int] = ()) -> None:
        try:
            with self._sending:
                orders.send(self._connection, order, fds)
        except OSError as error:  # it takes no orders any more, or has got a part of this one
            self.retire()
            if error.errno == errno.EBADF:
                raise ConnectionError("another thread has retired the agent") from error
            raise

    def explain_end(self) -> str:
        """Return that it has ended, or a template of it, and the end of what they have written, as a clause."""
        size = os.fstat(self._log).st_size
        said = os.pread(self._log, _MOST_SAID, max(0, size - _MOST_SAID)).decode("utf-8", "replace").strip()
        deadline = time.monotonic() + _END_SECONDS
        while not self.has_ended and time.monotonic() < deadline:  # its descriptors are closed first
            time.sleep(_LOOK_SECONDS)
        which = "the agent, the process that" if self.has_ended else "a process of the agent, which"
        return f"{which} starts workers, has ended" + (f"; it wrote:\n{said}" if said else "")

    def retire(self) -> None:
        """Let it end once its workers have."""
        self._is_retired = True
        self._connection.close()

    def end(self) -> None:
        """Kill it, with its workers, and wait for its end."""
        if self._lifeline >= 0:
            self.retire()
            descriptors.forget(self)
            os.close(self._lifeline)
            self._lifeline = -1
            os.close(self._log)
            if not self.has_ended:
                os.kill(self.pid, signal.SIGKILL)  # it may not follow its lifeline yet
                os.waitpid(self.pid, 0)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # else modules may be gone, and the system closes the lifeline
            self.end()


def find() -> Agent | None:
    """Return this process's agent; None where it has none, or one that cannot be used any more."""
    agents: list[Agent] = runtime.agents()
    for agent in [agent for agent in agents if not agent.is_usable]:
        with contextlib.suppress(ValueError):  # another thread has done it
            agents.remove(agent)
        if agent._owner == os.getpid():
            agent.retire()
    return agents[0] if agents else None


def start(*, background: bool = False) -> Agent:
    """Return this process's agent, and start it where there is none.

    Args:
        background: whether it imports torch at once, while nobody waits for it.

    Raises:
        OSError: the system gives no process or descriptor.
    """
    agent = find()
    if agent is None:
        agent = spawn(
            path=list_path(),
            variables=finder.complete_variables(environ.snapshot()),
            with_ipython="IPython" in sys.modules,
            background=background,
            idle_seconds=IDLE_SECONDS,
        )
        runtime.agents().append(agent)
        first = find()
        if first is not None and first is not agent:  # another thread has started it
            runtime.agents().remove(agent)
            agent.end()
            return first
    return agent


def order(order: WorkerOrder, fds: Sequence[int]) -> AgentWorker:
    """Order a worker of this process's agent, which is started where there is none; see `Agent.start_worker`."""
    try:
        return start().start_worker(order, fds)
    except ConnectionError:  # it has just ended
        return start().start_worker(order, fds)


def spawn(
    *,
    path: Sequence[str],
    variables: Mapping[str, str],
    with_ipython: bool,
    background: bool = False,
    idle_seconds: float | None = None,
) -> Agent:
    """Start a fresh Python as an agent.

    Args:
        path: where it finds modules.
        variables: of its environment.
        with_ipython: whether it imports IPython too.
        background: whether it imports torch at once, while nobody waits for it.
        idle_seconds: after which it ends, without orders and workers; None: with this process.

    Raises:
        OSError: the system gives no process or descriptor.
    """
    code = _START.format(
        path=list(path), with_ipython=with_ipython, background=background, seconds=idle_seconds
    )

    def begin(log: int, connection: int, end: int) -> int:
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
        with contextlib.ExitStack() as given, interrupts.block_interrupt_in_children():
            for number, fd in enumerate((log, log, connection, end), 1):
                copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
                given.callback(os.close, copy)
                actions.append((os.POSIX_SPAWN_DUP2, copy, number))
            words = [sys.executable, *children.list_flags(), "-c", code]
            return os.posix_spawn(sys.executable, words, dict(variables), file_actions=actions)

    return Agent(begin, variables)


def fork() -> None:
    """Let a fork of this process be its agent, where it can be forked: an agent has started it.

    Raises:
        OSError: the system gives no process or descriptor.
    """
    from . import server  # here: a notebook does not need it

    def begin(log: int, connection: int, end: int) -> int:
        if pid := os.fork():
            return pid
        try:
            server.become(log, connection, end)
        finally:
            os._exit(1)

    if server.MAY_FORK and server.is_clean():
        runtime.agents().append(Agent(begin, environ.snapshot()))


def end() -> None:
    """Kill this process's agent."""
    agent = find()
    if agent is not None:
        runtime.agents().clear()
        agent.end()


def list_path() -> list[str]:
    """Return where an agent finds modules: not beside the notebook or script, where any name may be a file's."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folders = {"", orders.find_directory(), *([os.path.dirname(os.path.realpath(script))] if script else [])}
    return [*(place for place in sys.path if place not in folders), _PACKAGE]
