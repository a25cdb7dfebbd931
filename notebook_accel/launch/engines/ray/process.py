"""The process of one rank under Ray: takes what its actor hands over, and becomes a worker."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ...transfer.shared_memory import SharedPickle

if TYPE_CHECKING:  # with torch, which the actor does without
    from ...transfer.random_states import RandomStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """What the notebook tells all ranks; actors pass it on unread, because reading it needs torch.

    Attributes:
        random_states: the states of the notebook's generators.
        sources: lines of the notebook's cells, by the file name under which they were compiled.
        child_start_method: how the worker's own children start; None for the default.
        in_background: whether the notebook runs cells meanwhile.
    """

    random_states: RandomStates
    sources: Mapping[str, list[str]]
    child_start_method: str | None
    in_background: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptors:
    """File descriptors that a process is started with.

    Attributes:
        events: a socket for events and orders.
        stdout: a pipe for its output.
        stderr: a pipe for its errors.
        lifeline: a pipe that closes when the actor ends.
        store: a socket that listens for the store of the run; rank 0 opens the store there.
    """

    events: int
    stdout: int
    stderr: int
    lifeline: int
    store: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What an actor hands to its process by standard input; the payload's descriptor follows by the event socket.

    Attributes:
        rank: the process's rank.
        environment: all its environment variables.
        descriptors: those that it was started with.
        spans: where each part of the payload lies in the shared memory: offset and length in bytes.
        address: the node's IP address.
        sends_value: whether the notebook wants the value that the function returns.
        directory: the working folder.
        notes: a pickled `Notes`.
    """

    rank: int
    environment: Mapping[str, str]
    descriptors: Descriptors
    spans: Sequence[tuple[int, int]]
    address: str
    sends_value: bool
    directory: str
    notes: bytes


def main(events: int, with_ipython: bool) -> None:
    """Become the worker that the `Handover` on standard input describes; never returns.

    Args:
        events: descriptor of the event socket.
        with_ipython: whether to import IPython, while there is nothing else to do yet.
    """
    from torch.distributed import TCPStore

    from ...supervise import socket_folder
    from ...worker import main

    if with_ipython:
        import IPython.core.interactiveshell  # noqa: F401
    try:
        handover: Handover = pickle.load(sys.stdin.buffer)
    except EOFError:
        sys.exit(0)  # the launch ended before this rank had a part in it
    socket_folder.use_short_folder()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    connection = socket.socket(fileno=events)
    if sys.platform == "win32":
        raise NotImplementedError  # RayEngine refuses it
    payload = socket.recv_fds(connection, 1, 1)[1][0]

    notes: Notes = pickle.loads(handover.notes)
    descriptors, store = handover.descriptors, None
    listening = socket.socket(fileno=descriptors.store)
    if handover.rank == 0:
        port = listening.getsockname()[1]
        store = TCPStore(
            handover.address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    else:
        listening.close()
    spec = main.WorkerSpec(
        rank=handover.rank,
        environment=handover.environment,
        stdout=Connection(descriptors.stdout, readable=False),
        stderr=Connection(descriptors.stderr, readable=False),
        events=connection,
        lifeline=Connection(descriptors.lifeline, writable=False),
        payload=SharedPickle.from_descriptor(payload, handover.spans),
        sends_value=handover.sends_value,
        forked=False,
        with_ipython=with_ipython,
        threads=None,  # OMP_NUM_THREADS, which Ray sets to the CPUs of the actor, was there before torch was
        child_start_method=notes.child_start_method,
        in_background=notes.in_background,
        directory=handover.directory,
        random_states=notes.random_states,
        sources=notes.sources,
        leaves_last=store is not None,
    )
    main.main(spec)
