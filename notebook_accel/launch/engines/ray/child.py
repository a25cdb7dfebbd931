"""The process of one rank under Ray, which its actor starts: from what the actor hands it to the worker's function."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ...segment import Segment

if TYPE_CHECKING:  # with torch, which the actor does without
    from ...randomness import RandomStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """What the notebook tells all ranks; the actor passes it on without looking: it holds a process without torch.

    Attributes:
        random_states: of the notebook's generators.
        sources: lines of cells, by the name under which they were compiled.
        child_start_method: how the worker's own children start.
        in_background: whether cells run meanwhile.
    """

    random_states: RandomStates
    sources: Mapping[str, list[str]]
    child_start_method: str | None
    in_background: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """Descriptors that a process is started with; `store` listens for the store of the run, which rank 0 holds."""

    events: int
    stdout: int
    stderr: int
    lifeline: int
    store: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What an actor hands to its process, by its standard input; the payload's descriptor comes by the event socket.

    `places` are the payload's parts, `address` is the node's. `notes` are pickled `Notes`.
    """

    rank: int
    environment: Mapping[str, str]
    ends: Ends
    places: Sequence[tuple[int, int]]
    address: str
    sends_value: bool
    directory: str
    notes: bytes


def main(events: int, with_ipython: bool) -> None:
    """Be the worker of the rank that standard input tells; never returns.

    Args:
        events: descriptor of the event socket.
        with_ipython: whether to import IPython, while there is nothing to do yet.
    """
    from torch.distributed import TCPStore

    from ... import worker

    if with_ipython:
        import IPython.core.interactiveshell  # noqa: F401
    try:
        handover: Handover = pickle.load(sys.stdin.buffer)
    except EOFError:
        sys.exit(0)  # the launch ended before this rank had a part in it
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    connection = socket.socket(fileno=events)
    if sys.platform == "win32":
        raise NotImplementedError  # RayEngine refuses it
    payload = socket.recv_fds(connection, 1, 1)[1][0]

    notes: Notes = pickle.loads(handover.notes)
    ends, store = handover.ends, None
    listening = socket.socket(fileno=ends.store)
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
    seat = worker.Seat(
        rank=handover.rank,
        environment=handover.environment,
        stdout=Connection(ends.stdout, readable=False),
        stderr=Connection(ends.stderr, readable=False),
        events=connection,
        lifeline=Connection(ends.lifeline, writable=False),
        payload=Segment.received(payload, handover.places),
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
    worker.main(seat)
