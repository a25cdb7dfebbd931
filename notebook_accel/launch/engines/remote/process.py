"""The process of one rank on another machine: takes what is handed over to it, and becomes a worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from ...transfer.shared_memory import SharedPickle

if TYPE_CHECKING:  # with torch, which those who hold processes do without
    from ...transfer.random_states import RandomStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """What the notebook tells all ranks; who holds a process passes it on unread, because reading it needs torch.

    Attributes:
        random_states: the states of the notebook's generators.
        sources: lines of the notebook's cells, by the file name under which they were compiled.
        child_start_method: how the worker's own children start; None for the default.
        in_background: whether the notebook runs cells meanwhile.
        serve: what the worker does instead of calling a function once, see `worker.main.WorkerSpec`; None for nothing.
    """

    random_states: RandomStates
    sources: Mapping[str, list[str]]
    child_start_method: str | None
    in_background: bool
    serve: Callable[..., None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptors:
    """File descriptors that a process is started with.

    Attributes:
        events: a socket for events and orders.
        stdout: a pipe for its output.
        stderr: a pipe for its errors.
        lifeline: a pipe that closes when its holder, an actor of Ray or the agent of a host, ends.
        store: a socket that listens for the store of the run; rank 0 opens the store there. -1 for none.
    """

    events: int
    stdout: int
    stderr: int
    lifeline: int
    store: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What a process gets by standard input; the payload's descriptor follows by the event socket.

    Attributes:
        rank: the process's rank.
        environment: all its environment variables.
        spans: where each part of the payload lies in the shared memory: offset and length in bytes.
        address: the machine's IP address.
        sends_value: whether the notebook wants the value that the function returns.
        directory: the working folder.
        path: the folders where it finds modules.
        with_ipython: whether to import IPython, because the notebook has.
        notes: a pickled `Notes`.
        threads: threads of torch's CPU kernels; None where OMP_NUM_THREADS was there before torch was.
    """

    rank: int
    environment: Mapping[str, str]
    spans: Sequence[tuple[int, int]]
    address: str
    sends_value: bool
    directory: str
    path: Sequence[str]
    with_ipython: bool
    notes: bytes
    threads: int | None = None


def main(descriptors: Descriptors, with_ipython: bool) -> NoReturn:
    """Become the worker that the `Handover` on standard input describes; never returns.

    Args:
        descriptors: those that the process was started with.
        with_ipython: whether to import IPython, while there is nothing else to do yet.
    """
    import torch.distributed  # noqa: F401

    from ...worker import main as _main  # noqa: F401

    if with_ipython:
        import IPython.core.interactiveshell  # noqa: F401
    try:
        handover: Handover = pickle.load(sys.stdin.buffer)
    except EOFError:
        sys.exit(0)  # the launch ended before this rank had a part in it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    become_worker(descriptors, handover)


def become_worker(descriptors: Descriptors, handover: Handover) -> NoReturn:
    """Run the rank that a handover describes; never returns.

    Args:
        descriptors: the process's.
        handover: the rank and its surroundings.
    """
    from torch.distributed import TCPStore

    from ...supervise import socket_folder
    from ...worker import main

    socket_folder.use_short_folder()
    connection = socket.socket(fileno=descriptors.events)
    if sys.platform == "win32":
        raise NotImplementedError  # the engines refuse it
    payload = socket.recv_fds(connection, 1, 1)[1][0]

    notes: Notes = pickle.loads(handover.notes)
    store: Any = None
    listening = socket.socket(fileno=descriptors.store) if descriptors.store >= 0 else None
    if listening is not None and handover.rank == 0:
        port = listening.getsockname()[1]
        with _without_errors():  # torch complains of a machine whose address has no name
            store = TCPStore(
                handover.address,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
    elif listening is not None:
        listening.close()
    spec = main.WorkerSpec(
        rank=handover.rank,
        environment=handover.environment,
        stdout=Connection(descriptors.stdout, readable=False),
        stderr=Connection(descriptors.stderr, readable=False),
        events=connection,
        lifeline=Connection(descriptors.lifeline, writable=False),
        payload=SharedPickle.from_descriptor(payload, handover.spans),
        serve=notes.serve,
        sends_value=handover.sends_value,
        forked=False,
        with_ipython=handover.with_ipython,
        threads=handover.threads,
        child_start_method=notes.child_start_method,
        in_background=notes.in_background,
        has_all_nodes=True,
        directory=handover.directory,
        random_states=notes.random_states,
        sources=notes.sources,
        leaves_last=store is not None,
    )
    main.main(spec)


@contextlib.contextmanager
def _without_errors() -> Iterator[None]:
    """Keep what C code writes to this process's errors from the cell."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
