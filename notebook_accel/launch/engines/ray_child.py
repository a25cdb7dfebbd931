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

from ..segment import Segment

if TYPE_CHECKING:  # with torch, which the actor does without
    from ..randomness import RandomStates


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """What the notebook tells all ranks; the actor passes it on without looking: it holds a process without torch.

    Attributes:
        random_states: of the notebook's generators.
        sources: lines of cells, by the name under which they were compiled.
        with_ipython: whether the notebook has IPython.
        child_start_method: how the worker's own children start.
        in_background: whether cells run meanwhile.
    """

    random_states: RandomStates
    sources: Mapping[str, list[str]]
    with_ipython: bool
    child_start_method: str | None
    in_background: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What an actor hands to its process, by its standard input.

    `events`, `stdout`, `stderr`, `lifeline`, `payload` and `store` are descriptors; `store` listens for the store of
    the run and is None where another rank holds it. `places` are the payload's parts. `notes` are pickled `Notes`.
    """

    rank: int
    environment: Mapping[str, str]
    events: int
    stdout: int
    stderr: int
    lifeline: int
    payload: int
    places: Sequence[tuple[int, int]]
    store: int | None
    address: str
    sends_value: bool
    directory: str
    notes: bytes


def main() -> None:
    """Be the worker of the rank that standard input tells; never returns."""
    handover: Handover = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    from torch.distributed import TCPStore

    from .. import worker

    notes: Notes = pickle.loads(handover.notes)
    store = None
    if handover.store is not None:
        port = socket.socket(fileno=os.dup(handover.store)).getsockname()[1]
        store = TCPStore(
            handover.address, port, is_master=True, wait_for_workers=False, master_listen_fd=handover.store
        )
    seat = worker.Seat(
        rank=handover.rank,
        environment=handover.environment,
        stdout=Connection(handover.stdout, readable=False),
        stderr=Connection(handover.stderr, readable=False),
        events=socket.socket(fileno=handover.events),
        lifeline=Connection(handover.lifeline, writable=False),
        payload=Segment.received(handover.payload, handover.places),
        sends_value=handover.sends_value,
        forked=False,
        with_ipython=notes.with_ipython,
        threads=None,  # OMP_NUM_THREADS, which Ray sets to the CPUs of the actor, was there before torch was
        child_start_method=notes.child_start_method,
        in_background=notes.in_background,
        directory=handover.directory,
        random_states=notes.random_states,
        sources=notes.sources,
        leaves_last=store is not None,
    )
    worker.main(seat)
