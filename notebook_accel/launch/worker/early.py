"""The first code of a worker that a fork server starts: what fails before the worker itself is imported is heard."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol


class _Closable(Protocol):
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Sealed:
    """A function and its arguments that arrive pickled, so that their modules are imported when they are opened.

    Args:
        function: of a module.
        args: for it; what a process is started with may be among them, such as ends of pipes.
    """

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._content = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Received, (bytes(ForkingPickler.dumps(self._content)),)


class _Received:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def call(self) -> None:
        function, args = pickle.loads(self._data)
        function(*args)


def run(stderr: _Closable, sealed: Any) -> None:
    """Send this process's errors to the launcher from now on, and call the sealed function.

    Args:
        stderr: an end of the pipe that the launcher reads.
        sealed: a `Sealed` that has arrived.
    """
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    sealed.call()
