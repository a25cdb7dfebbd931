"""A worker ends with the process that launched it. Needs the standard library alone, so it is imported at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from typing import Final

from ...stream.readable import wait_readable
from ..shared_memory import remove_tensors
from ..trackers import is_tracker

_F_SETSIG: Final = 10  # Linux: which signal O_ASYNC sends
_SHELL: Final = "/bin/sh"
_KILLER: Final = 'read _; kill -s KILL -- "-$0"'
_OBEY_SECONDS: Final = 0.5  # from SIGTERM to SIGKILL; as long is looked for more to kill
_LOOK_SECONDS: Final = 0.005


def follow(fd: int) -> None:
    """Let this process group be killed when the other end of a pipe closes; not for Windows.

    On Linux the system itself sends SIGKILL; elsewhere a small shell does, which waits for the end of the pipe. Both
    do it also while C code runs or hangs, and also to a program that this process becomes.

    Args:
        fd: our end of the pipe. Nothing is ever written to it.
    """
    if sys.platform == "win32":
        raise NotImplementedError("Windows has no process groups: see worker.main")
    try:
        import fcntl

        if sys.platform != "linux":
            raise OSError("only Linux chooses the signal of O_ASYNC")
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except (ImportError, OSError, AttributeError):
        _start_killer(fd)
        return
    if wait_readable(fd, 0):  # it closed before the system was told
        os._exit(1)


def _start_killer(fd: int) -> None:
    """Start a shell that kills this process group when the other end of a pipe closes; a thread where there is none."""
    if sys.platform == "win32":
        return  # see `follow`
    words = ["sh", "-c", _KILLER, str(os.getpgrp())]
    try:
        os.posix_spawn(_SHELL, words, {}, file_actions=[(os.POSIX_SPAWN_DUP2, fd, 0)], setsid=True)
    except (OSError, NotImplementedError):
        threading.Thread(target=_wait_for_end, args=(fd,), daemon=True).start()


def list_children() -> list[int]:
    """Return the living children of this process, their children, and so on, as far as the system lists them."""
    return _list_below(os.getpid()) if sys.platform == "linux" else []


def end_children(earlier: Iterable[int] = ()) -> None:
    """Ask all that this process has started and that is in its session to end, and kill what does not obey.

    A worker does so as its last act, as far as the system lists its children: where its notebook is just being killed,
    nobody else would do it. Shared memory that they had no time to give away is removed.

    Args:
        earlier: children that others may have ended since, as multiprocessing ends its daemons.
    """
    if sys.platform != "linux":
        return
    session = os.getsid(0)
    ended = set(earlier)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        sent: set[int] = set()
        end = time.monotonic() + _OBEY_SECONDS
        while running := {pid for pid in _list_below(os.getpid()) if _is_running_in(pid, session)}:
            new = running - sent
            for pid in new:
                with contextlib.suppress(OSError):
                    os.kill(pid, signum)
            sent |= new
            ended |= new
            is_done = signum == signal.SIGKILL and not new  # nobody waits for what cannot but end
            if is_done or time.monotonic() >= end:
                break
            time.sleep(_LOOK_SECONDS)
    remove_tensors({pid for pid in ended if _read_state(pid) in "ZX"})


def _list_below(pid: int) -> list[int]:
    """Return the living children of a process, their children, and so on."""
    found: list[int] = []
    threads: list[str] = []
    with contextlib.suppress(OSError):  # it has ended
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        # the thread has just ended, or this system lists no children
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return [pid for child in found for pid in (child, *_list_below(child))]


def _is_running_in(pid: int, session: int) -> bool:
    """Return whether a process of a session has not ended; not of a tracker, which ends by itself, after this one."""
    if sys.platform == "win32":  # it has no sessions
        return False
    try:
        its_session = os.getsid(pid)
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            command = file.read().split("\0")
    except OSError:
        return False
    return its_session == session and _read_state(pid) not in "ZX" and not is_tracker(command)


def _read_state(pid: int) -> str:
    """Return the letter of a process's state, see man 5 proc; X where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _wait_for_end(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(fd, 1)
    if sys.platform != "win32":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
