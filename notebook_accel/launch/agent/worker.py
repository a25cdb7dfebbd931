"""A worker that an agent starts: what was ordered becomes this process."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import process
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from ... import environ
from .. import children, signals
from ..transfer.shared_memory import SharedPickle
from ..worker import script
from . import orders
from .orders import WorkerOrder

if TYPE_CHECKING:  # with torch
    from ..worker.main import WorkerEnds, WorkerSpec

_SCRIPT: Final = os.path.abspath(script.__file__)
_FRESH: Final = "import sys; sys.path[:] = {path!r}; from {module} import begin; begin({fds!r}, {end})"


class Work(Protocol):
    """What the `work` of a `WorkerOrder` becomes in the worker."""

    def run(self, ends: WorkerEnds, fds: Sequence[int]) -> NoReturn:
        """Do it, as this process.

        Args:
            ends: join the worker with whoever ordered it.
            fds: further descriptors of the order.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class FreshWorker:
    """The work of a worker on the notebook's own machine.

    Attributes:
        spec: what it does.
        memory: how the payload lies in the last descriptors, see `SharedPickle.layout`; None where there is none.
        authkey: of the notebook's multiprocessing: with it a worker reaches its managers.
    """

    spec: WorkerSpec
    memory: Any
    authkey: bytes

    def run(self, ends: WorkerEnds, fds: Sequence[int]) -> NoReturn:
        """Run the function; the first descriptor is that of the notebook's resource tracker."""
        from ..worker.main import main

        process.current_process().authkey = self.authkey
        children.use_tracker(fds[0])
        payload = None if self.memory is None else SharedPickle.from_filenos(self.memory, fds[1:])
        main(self.spec, ends, payload)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The work of a process that outlives who ordered it: no lifeline ends it.

    Attributes:
        module: its name; its function `main` gets the arguments and the further descriptors, and returns the exit code.
        arguments: of it.
    """

    module: str
    arguments: Sequence[Any]

    def run(self, ends: WorkerEnds, fds: Sequence[int]) -> NoReturn:
        """Run it; nobody who ordered it waits."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ends.events.close()
        ends.stdout.close()
        ends.stderr.close()
        os.close(ends.lifeline)
        os._exit(importlib.import_module(self.module).main(*self.arguments, *fds))


def execute(order: WorkerOrder, fds: Sequence[int], end: int) -> NoReturn:
    """Become a fresh Python that runs a script, or a function.

    Args:
        order: says which.
        fds: its descriptors.
        end: of its lifeline.
    """
    kept = [fds[2], end] if order.command else [fd for fd in fds if fd != fds[1]] + [end]
    for fd in kept:
        os.set_inheritable(fd, True)
    if order.command:
        for standard_input in fds[5:]:
            os.dup2(standard_input, 0)
        place = f"{order.rank},{fds[2]},{end},{signals.STACK_SIGNAL or 0}"
        words = [_SCRIPT, place, *order.command]
    else:
        words = [
            *children.list_flags(),
            "-c",
            _FRESH.format(path=sys.path, module=__name__, fds=list(fds), end=end),
        ]
    if order.directory:
        os.chdir(order.directory)
    os.execve(sys.executable, [sys.executable, *words], dict(order.environment))


def begin(fds: Sequence[int], end: int) -> NoReturn:
    """Run a function in a fresh Python.

    Args:
        fds: of the order.
        end: of the lifeline.
    """
    for fd in (fds[0], *fds[2:], end):
        os.set_inheritable(fd, False)
    run(orders.read(fds[0]), fds, end)


def run(order: WorkerOrder, fds: Sequence[int], end: int) -> NoReturn:
    """Run a function; never returns.

    Args:
        order: what to run.
        fds: its descriptors; the output of this process goes where it should already.
        end: of the lifeline.
    """
    from ..worker.main import WorkerEnds

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.close(fds[0])
    environ.restore(order.environment)
    sys.path[:] = order.imports.path
    for place in [place for place, finder in sys.path_importer_cache.items() if finder is None]:
        del sys.path_importer_cache[place]  # it was no folder when it was looked for
    ends = WorkerEnds(
        events=socket.socket(fileno=fds[2]),
        stdout=Connection(fds[3], readable=False),
        stderr=Connection(fds[4], readable=False),
        lifeline=end,
    )
    work: Work = pickle.loads(order.work)
    work.run(ends, fds[5:])
