"""The first code of a fresh worker: what fails before the worker itself is imported is heard."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, Final, Protocol

NAME: Final = "notebook_accel rank"
"""How the name of a worker's process starts, as multiprocessing knows it."""


class _Closable(Protocol):
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Nothing:
    """What a process of the fork server does that is only to show that the server answers.

    It needs no import beside this module's, and so has ended before a worker begins.
    """

    def _bootstrap(self, parent_sentinel: int) -> int:
        return 0


class Sealed:
    """A function and its arguments that arrive pickled, so that their modules are imported when they are opened.

    They go by shared memory, except on Windows. Who starts a process writes the rest to a pipe and waits until all is
    written: more than the pipe holds would be waited for until the process has read it, and for ever if it ends or
    stands still before.

    Args:
        function: of a module.
        args: for it; what a process is started with may be among them, such as ends of pipes.
    """

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._content = (function, args)
        self._fd = -1

    def __reduce__(self) -> tuple[Any, ...]:
        data = bytes(reduction.ForkingPickler.dumps(self._content))
        if sys.platform == "win32":
            return _Received, (data,)
        from ..transfer import shared_memory  # here: the process itself does without

        self.close()
        self._fd = shared_memory.write_unnamed(data)
        return _Received, (reduction.DupFd(self._fd),)

    def close(self) -> None:
        """Give the memory back, once the process is started."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Received:
    def __init__(self, content: Any) -> None:
        self._content = content

    def call(self) -> None:
        data = self._content
        if not isinstance(data, bytes):
            with open(data.detach(), "rb") as file:
                data = file.read()
        function, args = pickle.loads(data)
        function(*args)


def run(stderr: _Closable | None, sealed: Any) -> None:
    """Send this process's errors to the launcher from now on, and call the sealed function.

    Args:
        stderr: an end of the pipe that the launcher reads; None where they go there already.
        sealed: a `Sealed` that has arrived.
    """
    if stderr is not None:
        os.dup2(stderr.fileno(), 2)
        stderr.close()
    sealed.call()
