"""Signals: ending process trees, holding back the interrupt, and saying what a signal means."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import psutil

CAUSES: Final = {
    "SIGKILL": "most often the operating system's out-of-memory killer: use less memory in each process, "
    "or fewer processes",
    "SIGTERM": "something outside the launch asked it to end",
    "SIGSEGV": "a crash in C code: the output above shows where Python was",
    "SIGBUS": "most often a full /dev/shm: use fewer data loader workers, or give it more room",
    "SIGABRT": "C code gave up: its message is in the output above",
    "SIGFPE": "an arithmetic error in C code, an integer division by zero for example",
    "SIGILL": "a CPU instruction that this machine lacks: a library built for another processor",
    "SIGINT": "it was interrupted",
    "SIGHUP": "the terminal or session it belonged to ended",
    "SIGXCPU": "the limit on CPU time was reached (ulimit -t)",
    "SIGXFSZ": "the limit on file size was reached (ulimit -f)",
}


def name_of(signum: int) -> str:
    """Return a signal's name, `signal 42` where it has none."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def likely_cause(signum: int) -> str:
    """Return what most often sends the signal, or empty."""
    return CAUSES.get(name_of(signum), "")


if sys.platform == "win32":
    KILL: Final = signal.SIGTERM  # every signal does
else:
    KILL: Final = signal.SIGKILL
"""What ends a process in any case."""


class _Hold:
    """A signal handler that only remembers."""

    def __init__(self) -> None:
        self.was_called = False

    def __call__(self, signum: int, frame: object) -> None:
        self.was_called = True


@contextlib.contextmanager
def interrupt_held() -> Iterator[None]:
    """Let the block end although the user interrupts; the interrupt is raised after it, the outermost where nested."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or isinstance(signal.getsignal(signal.SIGINT), _Hold):
        yield
        return
    hold = _Hold()
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if hold.was_called:
        raise KeyboardInterrupt


@contextlib.contextmanager
def blocked_in_children() -> Iterator[None]:
    """Let processes that the block starts have the interrupt blocked, until they unblock it.

    A front end sends the interrupt to the kernel's whole process group.
    """
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def descendants(pids: Sequence[int]) -> list[psutil.Process]:
    """Return the living processes below the given ones, without these."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            found += psutil.Process(pid).children(recursive=True)
    return found


def send(pid: int, signum: int) -> None:
    """Send a signal to one process; nothing happens where it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError, OSError):
        os.kill(pid, signum)


def end_now(pid: int) -> None:
    """Kill one process; on Windows every signal does."""
    send(pid, KILL)


def kill_group(leader: int) -> bool:
    """Kill a process group, also one whose leader has ended; return whether there was one."""
    if sys.platform == "win32":
        return False
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_groups(pids: Sequence[int], below: Sequence[psutil.Process]) -> None:
    """Kill workers, each the leader of a process group, with everything that they started."""
    for pid in pids:
        if not kill_group(pid):
            end_now(pid)
    for process in below:
        with contextlib.suppress(psutil.Error):
            process.kill()


def wait_gone(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Wait until the processes have ended, `seconds` at most."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(_alive, processes)):
        time.sleep(0.005)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
