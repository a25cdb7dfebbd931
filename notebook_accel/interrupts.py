"""Interrupts that come where the code can bear them: delayed, obeyed between two steps, or kept from children."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

PATIENCE: Final = 1.0
"""Seconds that the waits of a launch or a call have to obey an interrupt; then it comes wherever the code is."""
_INSIST_SECONDS: Final = 0.1
_LATER_SECONDS: Final = 0.02


_Handler = Callable[[int, FrameType | None], object] | int


class _DelayedInterrupt:
    """A signal handler that remembers that it was called, and that loses its patience if nothing obeys.

    Args:
        before: the handler that it stands for; SIG_IGN or SIG_DFL where the code has set that meanwhile.
        patience: seconds that an interrupt may be delayed.

    Attributes:
        was_called: whether there is an interrupt that nothing has obeyed yet.
        is_insisting: whether a thread sends the signal again once it is late.
        ends_in_forks: whether interrupts come at once in processes that are forked meanwhile.
    """

    def __init__(self, before: _Handler, patience: float) -> None:
        self.before = before
        self.patience = patience
        self.was_called = False
        self._since = 0.0
        self._is_over = False
        self.is_insisting = self.ends_in_forks = False
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
                    signal.pthread_kill(self._main, signal.SIGINT)
        self.is_insisting = False


@contextlib.contextmanager
def delay_interrupt(
    patience: float = math.inf, comes_later: bool = False, ends_in_forks: bool = False
) -> Iterator[None]:
    """Delay an interrupt to the end of the block, and of the outermost block if they are nested.

    In a thread that is not the main thread this does nothing: Python interrupts the main thread only. An interrupt that
    this process ignores stays ignored.

    Args:
        patience: seconds after which an interrupt comes all the same, wherever the block is then, if no wait in it has
            called `obey_interrupt`. Infinite is for blocks that are short, or bound their waits themselves; such a
            block may be part of a patient one.
        comes_later: let it come some hundredths of a second after the block: for blocks in a place where Python drops
            exceptions, such as the end of a generator that nobody refers to any more.
        ends_in_forks: do not delay those of processes that the block forks.

    Raises:
        KeyboardInterrupt: at the end of the block, if the user interrupted it and it does not come later; in the place
            of an error of the block, too. A handler of the user's own is called instead, if there is one.
    """
    outer = _find_delayed()
    if outer is not None:
        before_block = outer.patience, outer.ends_in_forks
        outer.patience, outer.ends_in_forks = max(outer.patience, patience), ends_in_forks
        try:
            yield
        finally:
            outer.patience, outer.ends_in_forks = before_block
        return
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    handler = _DelayedInterrupt(before, patience)
    handler.ends_in_forks = ends_in_forks
    signal.signal(signal.SIGINT, handler)
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    finally:
        try:
            handler.end()
        finally:  # one that is late may come here still
            signal.signal(signal.SIGINT, handler.before)
    if comes_later and handler.was_called:
        with contextlib.suppress(RuntimeError):  # the system gives no further thread
            threading.Thread(target=_interrupt_later, args=(threading.get_ident(),), daemon=True).start()
            handler.was_called = False
    try:
        handler.obey()
        if problem is not None:
            raise problem
    finally:
        problem = None  # its traceback has this frame


def _stop_delaying_in_fork() -> None:
    handler = _find_delayed()
    if handler is not None and handler.ends_in_forks:
        signal.signal(signal.SIGINT, handler.before)


os.register_at_fork(after_in_child=_stop_delaying_in_fork)


def _interrupt_later(thread: int) -> None:
    time.sleep(_LATER_SECONDS)
    signal.pthread_kill(thread, signal.SIGINT)


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


def take_interrupt() -> bool:
    """Return whether the user has interrupted a block of `delay_interrupt`, and forget it: the caller obeys it."""
    handler = _find_delayed()
    if handler is None or not handler.was_called:
        return False
    handler.was_called = False
    return True


def _find_delayed() -> _DelayedInterrupt | None:
    """Return what delays interrupts of this thread; None where they come at once, or never."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _DelayedInterrupt) else None


@contextlib.contextmanager
def block_interrupt_in_children() -> Iterator[None]:
    """Block SIGINT in the processes that are started in the block. Each of them unblocks it when it is ready.

    A front end sends the interrupt to the whole process group of the kernel, so also to processes that just start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
