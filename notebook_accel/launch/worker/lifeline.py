"""A worker ends with the process that launched it. Needs the standard library alone, so it is imported at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading

from ...stream.readable import wait_readable

_F_SETSIG = 10  # Linux: which signal O_ASYNC sends


def follow(fd: int) -> None:
    """Let this process group be killed when the other end of a pipe closes; not for Windows.

    On Linux the system itself sends SIGKILL, also while C code runs or hangs, and also to a program that this process
    becomes; elsewhere a thread waits.

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
        threading.Thread(target=_wait_for_end, args=(fd,), daemon=True).start()
        return
    if wait_readable(fd, 0):  # it closed before the system was told
        os._exit(1)


def end_children(signum: int) -> None:
    """End all that this process has started and that is in its process group, as far as the system lists it.

    A worker does so as its last act: where its notebook is just being killed, nobody else would do it.

    Args:
        signum: the signal that ends them.
    """
    if sys.platform != "linux":
        return
    group, killed = os.getpgrp(), _find_tracker()
    while new := {pid for pid in _list_below(os.getpid()) if _is_in(pid, group)} - killed:
        killed |= new
        for pid in new:
            with contextlib.suppress(OSError):
                os.kill(pid, signum)


def _find_tracker() -> set[int]:
    """Return the process, if there is one, that removes what this one left in shared memory."""
    trackers = sys.modules.get("multiprocessing.resource_tracker")
    pid = getattr(getattr(trackers, "_resource_tracker", None), "_pid", None)
    return {pid} if isinstance(pid, int) else set()


def _list_below(pid: int) -> list[int]:
    """Return the living children of a process, their children, and so on."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or this system lists no children
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return [pid for child in found for pid in (child, *_list_below(child))]


def _is_in(pid: int, group: int) -> bool:
    if sys.platform == "win32":
        return False
    try:
        return os.getpgid(pid) == group
    except OSError:
        return False


def _wait_for_end(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.read(fd, 1)
    if sys.platform != "win32":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
