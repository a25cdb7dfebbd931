"""Whether a process of this node has ended, also where nobody can say how.

The system gives an exit code to whoever asks first, and to nobody where SIGCHLD is ignored.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Final, Protocol

import psutil

from ...stream.readable import wait_readable

_CODE_SECONDS: Final = 3.0
"""How long an exit code may come after the end: a fork server passes on those of its children."""

_NO_ANSWER: Final = 255
"""The exit code that multiprocessing makes up where the fork server is gone."""


class HasExitCode(Protocol):
    """A process that knows its exit code, unless somebody else took it; those of `multiprocessing` do."""

    @property
    def pid(self) -> int | None: ...
    @property
    def exitcode(self) -> int | None: ...
    @property
    def sentinel(self) -> int: ...


class EndWatch:
    """Watches a process until it has ended.

    Args:
        process: of this node, just started.
        server: process id of the fork server whose child it is; None where it is this process's.

    Attributes:
        fd: a descriptor that becomes readable as soon as `has_ended` has news; -1 where there is none. `has_ended` may
            change it: where a fork server has not passed on the code of a process that is gone, it is the code's.
        exitcode: negative for a signal; None while the process runs, and where nobody knows it.
    """

    def __init__(self, process: HasExitCode, server: int | None = None) -> None:
        self._process = process
        self._server = server
        self._pid = process.pid or 0
        self._gone: float | None = None
        self.exitcode: int | None = None
        self._pidfd = _open_pidfd(self._pid)
        self.fd = process.sentinel if self._pidfd < 0 and sys.platform != "win32" else self._pidfd

    def has_ended(self) -> bool:
        """Return whether the process has ended; `exitcode` then says how, or is None where nobody knows."""
        has_news = self.fd >= 0 and wait_readable(self.fd, 0)
        if self._gone is None and self._pidfd >= 0:
            if not has_news:
                return False  # whatever multiprocessing says: its fork server is gone, and the process still runs
            self._gone = time.monotonic()
        self.exitcode = self._process.exitcode
        if self.exitcode is not None:
            if self.exitcode == _NO_ANSWER and self._server is not None and has_ended(self._server):
                self.exitcode = None
            return True
        if self._gone is None and self._is_gone():
            self._gone = time.monotonic()
        if self._gone is None:
            return False
        if has_news:  # which stays: it would wake up whoever waits, again and again
            self.fd = self._process.sentinel if self.fd == self._pidfd else -1
        return time.monotonic() - self._gone > _CODE_SECONDS

    def _is_gone(self) -> bool:
        if sys.platform == "win32":
            return False  # there a handle keeps the exit code
        try:
            os.kill(self._pid, 0)
        except (ProcessLookupError, PermissionError):  # another user's process may have the number by now
            return True
        return False

    def close(self) -> None:
        """Give back what it holds."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = self.fd = -1


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, whoever started it.

    Args:
        pid: its id.
    """
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def _open_pidfd(pid: int) -> int:
    if sys.platform != "linux":
        return -1
    try:
        return os.pidfd_open(pid)
    # a Python that was built on an old system, an old kernel, a sandbox, or a process that is gone already
    except (AttributeError, OSError):
        return -1
