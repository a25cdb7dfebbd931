"""Loader processes whose loop is interrupted as it begins, or ends early: torch would leave some of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Any, Final

from ..interrupts import delay_interrupt

_START_SECONDS: Final = 5.0  # that an interrupt waits for loader processes to start
_PATIENCE_SECONDS: Final = 1.0  # from the end of a process's connections to its own end
_LOOK_SECONDS: Final = 0.01
_PIPES: Final = os.path.dirname(multiprocessing.__file__) + os.sep


def start_processes(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Return torch's iterator of a loader. An interrupt waits until it knows all of its processes, 5 s at most.

    Between a fork and the next line of Python nobody knows the new process, and it would stay.

    Args:
        begin: returns the iterator.

    Raises:
        KeyboardInterrupt: the user interrupted it; the processes end with the iterator.
    """
    with delay_interrupt(_START_SECONDS, ends_in_forks=True):
        return begin()


def end_processes(error: BaseException, reader: Any, kept: Any) -> None:
    """End the loader processes of the iterators that an error came through, or of the one whose loop was left.

    The frames of the error's traceback hold them as long as somebody holds the error, as a notebook does until the next
    one. There is no other way to one that failed before it was whole: where a process is killed while the others start.

    The frame that caught the error is left out: where it was asked for its variables, it keeps them, the error too.

    An interrupt waits until they have ended, and comes a moment later: a loop that is left ends its generator, where
    Python drops what is raised.

    Args:
        error: what an iterator of torch or torchdata raised, or a function that it called; GeneratorExit where the
            loop was left.
        reader: the iterator of torch or torchdata, where it was whole.
        kept: the iterator that goes on with the next epoch, because the processes are persistent; or None.

    Raises:
        RuntimeError: a loader process was killed while it handed over a batch. torch says so itself at other moments;
            at this one it raises what a broken connection happens to cause.
    """
    with delay_interrupt(comes_later=True):
        owners = {id(owner): owner for owner in (reader,) if hasattr(owner, "_shutdown_workers")}
        trace = error.__traceback__ and error.__traceback__.tb_next
        frames: list[Any] = []
        is_below = False
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            is_owner = hasattr(owner, "_shutdown_workers") and owner is not kept
            if is_owner:
                owners[id(owner)] = owner
            is_below |= is_owner
            if is_below or trace.tb_frame.f_globals.get("__package__") == __package__:
                frames.append(trace.tb_frame)
            trace = trace.tb_next
        text = _describe_killed(error, owners.values())
        for owner in owners.values():
            if owner is not kept:
                _end(owner)
        _forget_variables(frames)
    if text:
        del reader, kept, owners, owner, frames  # who keeps the error keeps what this frame has
        raise RuntimeError(text) from error


def _describe_killed(error: BaseException, iterators: Collection[Any]) -> str:
    """Return which loader process was killed, where that broke a connection of multiprocessing's; else empty."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_broken = isinstance(error, (OSError, EOFError)) and trace is not None
    if not is_broken or not trace.tb_frame.f_code.co_filename.startswith(_PIPES):  # type: ignore[union-attr]
        return ""
    workers = [worker for each in iterators for worker in getattr(each, "_workers", ())]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:  # its sentinel is one of the connections: it says no more
        for worker in workers:
            if code := worker.exitcode:
                how = f"exit code {code}" if code > 0 else _name_signal(-code)
                return (
                    f"DataLoader worker (pid {worker.pid}) was ended by {how}, while it handed over a batch"
                )
        if time.monotonic() > deadline:
            return ""
        time.sleep(_LOOK_SECONDS)


def _name_signal(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # one of the real-time signals
        return f"signal {signum}"


def _end(iterator: Any) -> None:
    """End the processes of an iterator, and close the pipes to them."""
    iterator._shutdown = False  # torch begins its own end but once, and an interrupt may have broken that off
    with contextlib.suppress(Exception):  # the error is what counts: torch's own ends do not raise either
        iterator._shutdown_workers()
    for worker in getattr(iterator, "_workers", ()):  # where torch's end was broken off too
        if worker._parent_pid != os.getpid():
            continue  # this process is a fork of the one whose they are
        worker.join(_PATIENCE_SECONDS)
        if worker.exitcode is None:
            worker.kill()
            worker.join(_PATIENCE_SECONDS)
    for queue in getattr(iterator, "_index_queues", ()):
        queue.cancel_join_thread()
        is_told = queue._close is not None  # by `close`
        queue.close()
        _end_threads(queue, is_told)


def _end_threads(queue: Any, is_told: bool) -> None:
    """End the threads that feed a queue, one after the other.

    torch's signal handler raises anywhere: where the thread has just started, `close` does not know it yet, and Python
    3.12 starts another one for the next word. Both close the same pipe, and one that finds it closed in that moment
    would wait for ever.

    Args:
        queue: of multiprocessing's.
        is_told: whether one of the threads has been told to end.
    """
    threads = [
        thread
        for thread in threading.enumerate()
        if any(value is queue._buffer for value in getattr(thread, "_args", ()))
    ]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while threads and time.monotonic() < deadline:
        if not is_told:
            queue._finalize_close(queue._buffer, queue._notempty)
        is_told, before = False, len(threads)
        while len(threads) == before and time.monotonic() < deadline:
            threads[0].join(_LOOK_SECONDS)
            threads = [thread for thread in threads if thread.is_alive()]


def _forget_variables(frames: list[Any]) -> None:
    """Let frames drop what they hold: an iterator that was not whole yet has pipes that nobody else closes."""
    for frame in frames:
        with contextlib.suppress(RuntimeError):  # it still runs
            frame.clear()
            _ = frame.f_locals  # which takes out of what it gave above what is no longer there
