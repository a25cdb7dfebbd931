"""In a worker: everything that is written, displayed or drawn goes to the notebook."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import getpass
import io
import os
import sys
from multiprocessing.connection import Connection
from typing import TextIO

from . import bars, displays
from .emit import Emitter


def redirect(stdout: Connection, stderr: Connection) -> None:
    """Make descriptors 1 and 2 the given ends of pipes, and every Python stream write to them.

    It has to be the first act of a forked worker: the streams of a notebook kernel hold locks that other
    threads of the kernel may have held at the fork.
    """
    os.dup2(stdout.fileno(), 1)
    os.dup2(stderr.fileno(), 2)
    stdout.close()
    stderr.close()
    new_out = _text_stream(1)
    new_err = _text_stream(2)
    for old, new in (
        (sys.stdout, new_out),
        (sys.__stdout__, new_out),
        (sys.stderr, new_err),
        (sys.__stderr__, new_err),
    ):
        if old is not None:
            _forward(old, new)
    sys.stdout = sys.__stdout__ = new_out  # type: ignore[misc,assignment]
    sys.stderr = sys.__stderr__ = new_err  # type: ignore[misc,assignment]


def install(emitter: Emitter) -> None:
    """Send displays, figures and tqdm bars as events; make `input` fail with a reason."""
    displays.install(emitter, flush)
    bars.install(emitter)
    builtins.input = getpass.getpass = _no_input


def flush() -> None:
    """Push out what Python holds back, and wait until the notebook has read it (0.2 s at most)."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for fd in (1, 2):
        _wait_until_read(fd)


def close() -> None:
    """Push out what Python, open figures and C's stdio hold back: the worker's last act."""
    displays.flush_figures()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def _text_stream(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _forward(old: TextIO, new: TextIO) -> None:
    """Let an old stream object, that a logging handler may hold, write to the new one."""
    for name in ("write", "writelines", "flush"):
        with contextlib.suppress(AttributeError, TypeError):
            setattr(old, name, getattr(new, name))


def _no_input(prompt: object = "", *args: object, **kwargs: object) -> str:
    raise EOFError(
        f"a worker of a notebook launch cannot ask for input ({prompt!r}): pass the value as an argument"
    )


def _wait_until_read(fd: int) -> None:
    """Wait until the other end of a pipe has read everything: the system counts the bytes that are under way."""
    if sys.platform == "win32":
        return
    import fcntl
    import struct
    import termios
    import time

    for _ in range(200):
        try:
            waiting = fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0")
        except OSError:
            return
        if struct.unpack("i", waiting)[0] == 0:
            return
        time.sleep(0.001)


def unused_stdin() -> None:
    """Give the worker an empty standard input, as `multiprocessing` does."""
    sys.stdin = io.TextIOWrapper(open(os.devnull, "rb"))  # noqa: SIM115 - lives as long as the worker
