"""What an agent is asked for. An order is a pickle in memory without a name, and travels with descriptors."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..transfer.shared_memory import write_unnamed
from .modules import Modules

STATUS: Final = struct.Struct("=ci")
"""What an agent writes to the status pipe of a worker: one of the three below, and a number."""
STARTED: Final = b"s"  # the process id
FAILED: Final = b"f"  # an errno: there is no process
ENDED: Final = b"e"  # the exit code
CLEAN: Final = b"c"
"""Says that an agent has done what it was told to import; of a template, that it can be forked."""
IDLE: Final = b"i"
"""Says that a template has had no worker for some time."""
UNCLEAN: Final = b"u"
"""Says that a template cannot be forked: it gets no orders."""
_MOST_FDS: Final = 250  # in one message; Linux takes 253


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a process inherits besides its environment.

    Attributes:
        resources: kind, soft and hard limit of each resource.
        cores: the cores that it may use; None where the system has no such set.
        umask: of new files; None where the system does not tell.
        niceness: how far it gives way to other processes.
    """

    resources: Sequence[tuple[int, int, int]]
    cores: Sequence[int] | None
    umask: int | None
    niceness: int = 0

    @classmethod
    def capture(cls) -> Limits:
        """Return those of this process."""
        import resource  # here: a file beside the notebook may have this name

        kinds = dict.fromkeys(kind for name, kind in vars(resource).items() if name.startswith("RLIMIT_"))
        umask = cores = None
        if sys.platform == "linux":
            cores = sorted(os.sched_getaffinity(0))
            status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
            words = status.partition("Umask:")[2].split()
            umask = int(words[0], 8) if words else None
        return cls(
            resources=[(kind, *resource.getrlimit(kind)) for kind in kinds],
            cores=cores,
            umask=umask,
            niceness=os.nice(0),
        )

    def adopt(self) -> None:
        """Give them to this process, as far as the system lets it have them."""
        import resource

        for kind, soft, hard in self.resources:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(kind, (soft, hard))
        if self.cores is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, self.cores)
        if self.umask is not None:
            os.umask(self.umask)
        with contextlib.suppress(OSError):
            os.nice(self.niceness - os.nice(0))


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportOrder:
    """Import modules, so that workers find them.

    Attributes:
        modules: those of the notebook.
        environment: the notebook's variables, which are read while they are imported.
        path: where they are found.
        in_background: whether nobody waits for it.
    """

    modules: Modules
    environment: Mapping[str, str]
    path: Sequence[str]
    in_background: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrder:
    """Start a worker.

    Its descriptors follow that of the order: status, events, stdout, stderr, and what the work needs besides.

    Attributes:
        rank: of the worker.
        environment: all its variables.
        directory: its working folder.
        limits: its limits.
        imports: what the notebook has imported, and where modules are found.
        command: what a rank of a script runs, see `launch.worker.script`; empty for a function.
        work: a pickled `agent.worker.Work`, for a function.
        num_fds: how many descriptors belong to the order, its own counted.
        outlives: whether the process is no descendant of the notebook's: what ends all of these leaves it alone.
    """

    rank: int
    environment: Mapping[str, str]
    directory: str
    limits: Limits
    imports: ImportOrder
    command: Sequence[str] = ()
    work: bytes = b""
    num_fds: int = 5
    outlives: bool = False


def find_directory() -> str:
    """Return the working folder of this process; empty where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def send(connection: socket.socket, order: object, fds: Sequence[int] = ()) -> None:
    """Send an order.

    Args:
        connection: to an agent.
        order: of a kind that it knows.
        fds: that follow the order's own.

    Raises:
        OSError: the agent has ended, or the system has no memory or descriptor.
    """
    file = write_unnamed(pickle.dumps(order))
    try:
        forward(connection, [file, *fds])
    finally:
        os.close(file)


def forward(connection: socket.socket, fds: Sequence[int]) -> None:
    """Send an order that was received, by its descriptors."""
    for first in range(0, len(fds), _MOST_FDS):
        socket.send_fds(connection, [b"o"], fds[first : first + _MOST_FDS])


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return an order and its descriptors, the order's own first.

    Raises:
        EOFError: nobody sends orders any more.
    """
    fds = _receive_fds(connection)
    order = read(fds[0])
    while len(fds) < getattr(order, "num_fds", 0):
        fds += _receive_fds(connection)
    return order, fds


def read(fd: int) -> Any:
    """Return the order that a descriptor holds."""
    return pickle.loads(os.pread(fd, os.fstat(fd).st_size, 0))


def _receive_fds(connection: socket.socket) -> list[int]:
    try:
        fds = socket.recv_fds(connection, 1, _MOST_FDS)[1]
    except ConnectionError:  # it was closed while it had something to read
        fds = []
    if not fds:  # or no descriptor is free
        raise EOFError
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds
