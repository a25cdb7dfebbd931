"""In a worker: sends everything that is written, displayed or drawn to the notebook."""

from __future__ import annotations

import bdb
import builtins
import contextlib
import ctypes
import getpass
import io
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Final, TextIO

from . import bars, displays
from .emit import Emitter
from .readable import count_unread_bytes
from .wire import PipeEnd

_READ_SECONDS = 2.0  # that a worker waits at most for a notebook that stands still
_DESCRIPTORS: Final[Mapping[str, int]] = {"stdout": 1, "stderr": 2}


class Capture:
    """Replaces this worker's output: descriptors 1 and 2 become ends of pipes.

    A forked worker has to make it first of all. The streams of a notebook kernel have locks, and other threads of the
    kernel may have held these at the fork.

    Args:
        stdout: the writing end of the notebook's pipe.
        stderr: likewise.
        emitter: sends displays and bars.
    """

    def __init__(self, stdout: PipeEnd, stderr: PipeEnd, emitter: Emitter) -> None:
        self._emitter = emitter
        for fd, end in ((1, stdout), (2, stderr)):
            os.dup2(end.fileno(), fd)
            end.close()
        self._streams = {"stdout": _text_stream(1), "stderr": _text_stream(2)}
        _replace_streams(self._streams["stdout"], self._streams["stderr"])

    def install(self) -> None:
        """Send displays, figures and tqdm's bars as events; make `input` fail with a reason."""
        displays.install(self._emitter, flush_pipes)
        bars.install(self._emitter)
        builtins.input = getpass.getpass = _no_input

    def restore(self) -> None:
        """Give Python its streams again where code has closed or removed them: else nothing is shown any more."""
        for name, fd in _DESCRIPTORS.items():
            if _is_lost(self._streams[name]):
                self._streams[name] = _text_stream(fd)
            for place in (name, f"__{name}__"):
                if _is_lost(getattr(sys, place, None)):
                    setattr(sys, place, self._streams[name])

    def write_out(self) -> None:
        """Write out Python's buffers, in any thread: they keep a line that has not ended, and a kill would lose it."""
        write_out(*self._streams.values())

    def push(self) -> None:
        """Write out the buffers of Python and of C's stdio, without waiting for the notebook."""
        _flush_python()
        _flush_c()

    def close(self) -> None:
        """Show open figures and write out the buffers of Python and of C's stdio: the worker's last act."""
        displays.flush_figures()
        self.push()


def _replace_streams(new_out: TextIO, new_err: TextIO) -> None:
    for old, new in (
        (sys.stdout, new_out),
        (sys.__stdout__, new_out),
        (sys.stderr, new_err),
        (sys.__stderr__, new_err),
    ):
        if old is not None:
            forward(old, new)
    sys.stdout = sys.__stdout__ = new_out  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = new_err  # type: ignore[misc,assignment]


def write_out(*streams: TextIO) -> None:
    """Write out what this process holds back of its output, in any thread.

    Args:
        streams: besides those of `sys`, which code may have replaced by its own.
    """
    for stream in {id(each): each for each in (*streams, sys.stdout, sys.stderr)}.values():
        if isinstance(stream, io.TextIOWrapper):  # others need not bear a second thread
            with contextlib.suppress(Exception):  # code has closed it
                stream.flush()


def flush_pipes() -> None:
    """Push out what this process holds back of its output, and wait until it was read (2 s at most)."""
    _flush_python()
    _wait_until_read(1, 2)


def _flush_python() -> None:
    for name in _DESCRIPTORS:
        with contextlib.suppress(Exception):
            getattr(sys, name).flush()


def _flush_c() -> None:
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def _wait_until_read(*fds: int) -> None:
    """Wait until the other ends of pipes have read everything; the system counts the bytes in between."""
    deadline = time.monotonic() + _READ_SECONDS
    while any(map(count_unread_bytes, fds)) and time.monotonic() < deadline:
        time.sleep(0.001)


def _is_lost(stream: Any) -> bool:
    try:
        return stream is None or bool(getattr(stream, "closed", False))
    except ValueError:  # its buffer was detached
        return True


def _text_stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def forward(old: TextIO, new: TextIO) -> None:
    """Let an old stream object write to the new one: a logging handler may still have it.

    Args:
        old: of the process that this one was forked from.
        new: takes what is written.
    """
    for name in ("write", "writelines", "flush"):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(old, name, getattr(new, name))


def _no_input(prompt: object = "", *args: object, **kwargs: object) -> str:
    if isinstance(sys._getframe(1).f_locals.get("self"), bdb.Bdb):
        # which takes an EOFError for the wish to quit, and shells do not show that
        raise RuntimeError(
            "a worker of a notebook launch cannot ask for input, as a debugger does: print what you look for, or call "
            "the function in the notebook itself"
        )
    raise EOFError(
        f"a worker of a notebook launch cannot ask for input ({prompt!r}): pass the value as an argument"
    )


def unused_stdin() -> None:
    """Give the worker an empty standard input, as `multiprocessing` does."""
    sys.stdin = io.TextIOWrapper(open(os.devnull, "rb"))  # noqa: SIM115 - lives as long as the worker
