"""A worker ends with the process that launched it. Needs the standard library alone, so it is imported at once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import threading
from typing import Final

from ...stream.readable import wait_readable

_F_SETSIG: Final = 10  # Linux: which signal O_ASYNC sends
_SHELL: Final = "/bin/sh"
_KILLER: Final = 'read _; kill -s KILL -- "-$0"'


def follow(fd: int) -> None:
    """Let this process group be killed when the other end of a pipe closes.

    On Linux the system itself sends SIGKILL; elsewhere a small shell does, which waits for the end of the pipe. Both
    do it also while C code runs or hangs, and also to a program that this process becomes.

    Args:
        fd: our end of the pipe. Nothing is ever written to it.
    """
    try:
        if sys.platform != "linux":
            raise OSError("only Linux chooses the signal of O_ASYNC")
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        _start_killer(fd)
        return
    if wait_readable(fd, 0):  # it closed before the system was told
        os._exit(1)


def _start_killer(fd: int) -> None:
    """Start a shell that kills this process group when the other end of a pipe closes; a thread where there is none."""
    words = ["sh", "-c", _KILLER, str(os.getpgrp())]
    try:
        os.posix_spawn(_SHELL, words, {}, file_actions=[(os.POSIX_SPAWN_DUP2, fd, 0)], setsid=True)
    except (OSError, NotImplementedError):
        threading.Thread(target=_wait_for_end, args=(fd,), daemon=True).start()


def _wait_for_end(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(fd, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
