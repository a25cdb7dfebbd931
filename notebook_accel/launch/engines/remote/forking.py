"""On a host: a process that has imported torch, from which the processes of ranks are forked."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from ... import signals
from .process import Descriptors, Handover, become_worker

_REPLY: Final = struct.Struct("!cqq")
_FORKED: Final = b"f"
_ENDED: Final = b"e"
_FDS: Final = 6
_BYTES: Final = 1 << 12
_START: Final = "import sys; sys.path[:] = {path!r}; from {module} import serve; serve({fd}, {with_ipython})"
_WARM: Final = "notebook_accel.launch.worker.warm"
_SHELL: Final = "IPython.core.interactiveshell"


@dataclass(eq=False)
class Forked:
    """A process that was asked for; see `remote.rank_process.Running`."""

    pid: int = 0
    returncode: int | None = None


class Forker:
    """The agent's end: starts the process that forks, and knows what it has forked.

    Args:
        variables: environment variables of the process.
        path: folders where it finds modules.
        with_ipython: whether it imports IPython too.

    Attributes:
        is_lost: whether the process has ended: it can fork no more.
    """

    def __init__(self, variables: Mapping[str, str], path: Sequence[str], with_ipython: bool) -> None:
        self._socket, theirs = socket.socketpair()
        self._replies = bytearray()
        self._waiting: list[Forked] = []  # that have no process id yet
        self._running: dict[int, Forked] = {}
        self.is_lost = False
        code = _START.format(path=list(path), module=__name__, fd=theirs.fileno(), with_ipython=with_ipython)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fileno(self) -> int:
        """Return the descriptor that can be read when there is something to look at."""
        return self._socket.fileno()

    def fork(self, handover: int, descriptors: Descriptors) -> Forked:
        """Ask for a process; never waits.

        Args:
            handover: descriptor of a file with its pickled `Handover`.
            descriptors: its ends.

        Raises:
            OSError: the process that forks has ended.
        """
        fds = [handover, *(fd for fd in _list_fds(descriptors) if fd >= 0)]
        if sys.platform == "win32":
            raise NotImplementedError
        socket.send_fds(self._socket, [b"x"], fds)
        forked = Forked()
        self._waiting.append(forked)
        return forked

    def look(self) -> None:
        """Note which processes were forked and which have ended; never waits."""
        if sys.platform == "win32":
            raise NotImplementedError
        while not self.is_lost:
            try:
                data = self._socket.recv(_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            self._replies += data
            while len(self._replies) >= _REPLY.size:
                what, pid, code = _REPLY.unpack_from(self._replies)
                del self._replies[: _REPLY.size]
                self._note(what, pid, code)

    def _note(self, what: bytes, pid: int, code: int) -> None:
        if what == _FORKED:
            forked = self._waiting.pop(0)
            forked.pid = pid
            self._running[pid] = forked
        elif pid in self._running:
            self._running.pop(pid).returncode = code

    def _lose(self) -> None:
        """Kill what it has forked: nobody else is told how these processes end."""
        self.is_lost = True
        for forked in (*self._running.values(), *self._waiting):
            if forked.pid:
                signals.kill(forked.pid)
            forked.returncode = -signals.KILL
        self._running.clear()
        self._waiting.clear()
        self._process.wait()

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _list_fds(descriptors: Descriptors) -> list[int]:
    """Return descriptors in the order in which they travel."""
    return [
        descriptors.events,
        descriptors.stdout,
        descriptors.stderr,
        descriptors.lifeline,
        descriptors.store,
    ]


def serve(fd: int, with_ipython: bool) -> NoReturn:
    """Import what ranks need, and fork a process at each request until the agent is gone.

    Args:
        fd: descriptor of the connection to the agent.
        with_ipython: whether to import IPython too.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    connection = socket.socket(fileno=fd)
    for name in ([_SHELL] if with_ipython else []) + [_WARM]:
        importlib.import_module(name)
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([fd, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, _BYTES)
            _reap(connection)
        if fd in ready:
            data, fds, _, _ = socket.recv_fds(connection, 1, _FDS)
            if not data:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (connection.detach(), woken, wakes):
                    os.close(other)
                _become_rank(fds)
            for given in fds:
                os.close(given)
            connection.sendall(_REPLY.pack(_FORKED, pid, 0))


def _reap(connection: socket.socket) -> None:
    """Tell the agent which processes have ended."""
    if sys.platform == "win32":
        raise NotImplementedError
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        connection.sendall(_REPLY.pack(_ENDED, pid, os.waitstatus_to_exitcode(status)))


def _become_rank(fds: Sequence[int]) -> NoReturn:
    """In the fork: become the rank that was handed over; what goes wrong before it is one goes to its errors."""
    try:
        if sys.platform != "win32":
            os.setsid()
        handover_fd, events, stdout, stderr, lifeline, *store = fds
        os.dup2(stderr, 2)
        os.dup2(stdout, 1)
        with open(handover_fd, "rb") as file:
            handover: Handover = pickle.load(file)
        sys.path[:] = handover.path
        if handover.with_ipython:
            importlib.import_module(_SHELL)
        descriptors = Descriptors(
            events=events,
            stdout=stdout,
            stderr=stderr,
            lifeline=lifeline,
            store=store[0] if store else -1,
        )
        become_worker(descriptors, handover)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
