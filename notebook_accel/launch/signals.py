"""Signals: names and likely causes, delayed interrupts, and the end of process trees."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
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
"""What most often sends each signal."""


def name_of(signum: int) -> str:
    """Return the name of a signal, such as `SIGKILL`.

    Args:
        signum: number of the signal.

    Returns:
        Its name; `signal 42` for a number without a name.
    """
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def likely_cause(signum: int) -> str:
    """Return what most often sends a signal.

    Args:
        signum: number of the signal.

    Returns:
        Part of a sentence, from `CAUSES`; empty if there is none.
    """
    return CAUSES.get(name_of(signum), "")


if sys.platform == "win32":
    KILL: Final = signal.SIGTERM  # Windows has no SIGKILL: there every signal ends the process
else:
    KILL: Final = signal.SIGKILL
"""The signal that no process can ignore."""

STACK_SIGNAL: Final[int | None] = getattr(signal, "SIGRTMIN", 0) + 7 if hasattr(signal, "SIGRTMIN") else None
"""Makes a worker write its stack to stderr, even while C code holds the GIL. None on systems without it.

Programs that use real-time signals take the lowest numbers first.
"""


PATIENCE: Final = 1.0
"""Seconds that the waits of a launch or a call have to obey an interrupt; then it comes wherever the code is."""
_INSIST_SECONDS: Final = 0.1


_Handler = Callable[[int, FrameType | None], object] | int


class _DelayedInterrupt:
    """A signal handler that remembers that it was called, and that loses its patience if nothing obeys.

    Args:
        before: the handler that it stands for; SIG_IGN or SIG_DFL where the code has set that meanwhile.
        patience: seconds that an interrupt may be delayed.

    Attributes:
        was_called: whether there is an interrupt that nothing has obeyed yet.
        is_insisting: whether a thread sends the signal again once it is late.
    """

    def __init__(self, before: _Handler, patience: float) -> None:
        self.before = before
        self.patience = patience
        self.was_called = False
        self._since = 0.0
        self._is_over = False
        self.is_insisting = False
        self._sent_again = False
        self._sending = threading.Lock()
        self._main = threading.get_ident()

    def __call__(self, signum: int, frame: object) -> None:
        again, self._sent_again = self._sent_again, False
        if again and not self.was_called:
            return  # it was obeyed meanwhile
        if not self.was_called:
            self.was_called, self._since = True, time.monotonic()
        if self._is_over:
            return
        if self._is_late():
            self.obey()
        elif not self.is_insisting:
            self._begin_to_insist()

    def _begin_to_insist(self) -> None:
        self.is_insisting = True
        try:
            _thread.start_new_thread(
                self._insist, ()
            )  # threading's own may wait for a lock that this thread holds
        except RuntimeError:  # the system gives no further thread: the waits obey
            self.is_insisting = False

    def obey(self) -> None:
        """Call the handler that it stands for, if the user has interrupted."""
        if self.was_called:
            self.was_called = False
            if callable(self.before):
                self.before(signal.SIGINT, sys._getframe())
            elif self.before == signal.SIG_DFL:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)

    def end(self) -> None:
        """Send no signal any more: the handler that it stands for takes its place."""
        with self._sending:
            self._is_over = True

    def _is_late(self) -> bool:
        return time.monotonic() - self._since >= self.patience

    def _insist(self) -> None:
        """Send the signal again once it is late: a system call of the main thread ends by a signal only."""
        while self.was_called and not self._is_over:
            time.sleep(_INSIST_SECONDS)
            with self._sending:
                if self.was_called and not self._is_over and self._is_late():
                    self._sent_again = True
                    if sys.platform == "win32":
                        _thread.interrupt_main()
                    else:
                        signal.pthread_kill(self._main, signal.SIGINT)
        self.is_insisting = False


@contextlib.contextmanager
def delay_interrupt(patience: float = math.inf) -> Iterator[None]:
    """Delay an interrupt to the end of the block, and of the outermost block if they are nested.

    In a thread that is not the main thread this does nothing: Python interrupts the main thread only. An interrupt that
    this process ignores stays ignored.

    Args:
        patience: seconds after which an interrupt comes all the same, wherever the block is then, if no wait in it has
            called `obey_interrupt`. Infinite is for blocks that are short, or bound their waits themselves; such a
            block may be part of a patient one.

    Raises:
        KeyboardInterrupt: at the end of the block, if the user interrupted it. A handler of the user's own is called
            instead, if there is one.
    """
    outer = _find_delayed()
    if outer is not None:
        before_patience, outer.patience = outer.patience, max(outer.patience, patience)
        try:
            yield
        finally:
            outer.patience = before_patience
        return
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    handler = _DelayedInterrupt(before, patience)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        handler.end()
        signal.signal(signal.SIGINT, handler.before)
    handler.obey()


@contextlib.contextmanager
def allow_interrupt() -> Iterator[None]:
    """Let an interrupt come at once in this part of a block of `delay_interrupt`: for code of the user's."""
    handler = _find_delayed()
    if handler is None:
        yield
        return
    signal.signal(signal.SIGINT, handler.before)
    try:
        handler.obey()
        yield
    finally:
        before = signal.signal(signal.SIGINT, handler)
        if before is not None:  # the code may have set its own, or have the signal ignored
            handler.before = before


def obey_interrupt() -> None:
    """Obey the user's interrupt of a block of `delay_interrupt`, if there was one; for waits in the block.

    Raises:
        KeyboardInterrupt: the user has interrupted it.
    """
    if (handler := _find_delayed()) is not None:
        handler.obey()


def is_interrupted() -> bool:
    """Return whether the user has interrupted a block of `delay_interrupt` that has not ended yet."""
    handler = signal.getsignal(signal.SIGINT)
    return isinstance(handler, _DelayedInterrupt) and handler.was_called


def _find_delayed() -> _DelayedInterrupt | None:
    """Return what delays interrupts of this thread; None where they come at once, or never."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _DelayedInterrupt) else None


@contextlib.contextmanager
def keep_exit_codes() -> Iterator[None]:
    """Let the exit codes of processes be known that end in the block, where this process ignores SIGCHLD.

    A program that starts this one may have it ignore the signal, and so may a library. In a thread that is not the main
    thread this does nothing: Python changes signals in the main thread only.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if sys.platform == "win32" or not is_main or signal.getsignal(signal.SIGCHLD) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


@contextlib.contextmanager
def block_interrupt_in_children() -> Iterator[None]:
    """Block SIGINT in the processes that are started in the block. Each of them unblocks it when it is ready.

    A front end sends the interrupt to the whole process group of the kernel, so also to processes that just start.
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
    """Return the living children, grandchildren and so on of some processes.

    Args:
        pids: ids of these processes; they are not in the result.
    """
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error, OSError):
            found += psutil.Process(pid).children(recursive=True)
    return found


def describe_state(pid: int) -> str:
    """Return a clause about what the system says of a process, which was killed and is still there.

    Args:
        pid: process id.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return "the system does not know it"
    if status == psutil.STATUS_DISK_SLEEP:
        return "the system waits for a disk, a network share or a device on its behalf"
    return f"the system says that it is {status}"


def send(pid: int, signum: int) -> None:
    """Send a signal to one process. If the process has ended, nothing happens.

    Args:
        pid: process id.
        signum: number of the signal.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError, OSError):
        os.kill(pid, signum)


def kill(pid: int) -> None:
    """Kill one process. If it has ended, nothing happens.

    Args:
        pid: process id.
    """
    send(pid, KILL)


def kill_group(leader: int, signum: int = KILL) -> bool:
    """Kill all processes of a group, even if its leader has ended.

    Args:
        leader: process id of the leader, which is the id of the group.
        signum: the signal.

    Returns:
        Whether there was such a group. Always False on Windows, which has none.
    """
    if sys.platform == "win32" or leader <= 0:  # 0 is the group of this process
        return False
    try:
        os.killpg(leader, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kill processes. If one has ended, nothing happens to it.

    Args:
        processes: such as `descendants`.
    """
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
