"""What a node says of itself when it meets the others, and what they may not disagree about."""

from __future__ import annotations

import functools
import hashlib
import platform
import socket
import types
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from .... import probes
from ...job import Job
from ...nodes import spoken

_DIGITS: Final = 12
_UNTIL_SAME: Final = ("num_nodes", "rdzv_id")  # nodes that differ in it may wait for each other for ever


@dataclass(frozen=True, kw_only=True)
class Card:
    """A node: where it is, how many ranks it has, and `same`, by option, what all nodes must have alike.

    `node_rank` is -1 for a node that is not let into the run yet, where nodes come and go.
    """

    node_rank: int
    host: str
    processes: int
    same: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the node's number and host, for messages."""
        return f"a new node ({self.host})" if self.node_rank < 0 else f"node {self.node_rank} ({self.host})"


def card_of(job: Job) -> Card:
    """Return what this node says of itself; `job` was checked."""
    same = {
        "rdzv_id": job.rendezvous.run_id,
        "num_nodes": spoken(job.rendezvous),
        "max_restarts": str(job.max_restarts),
        "mixed_precision": job.mixed_precision,
        "returns": job.returns,
        "notebook_accel": probes.version("notebook-accel") or "not installed",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "the function": f"{job.name}, code {digest(job.function)}",
    }
    return Card(
        node_rank=job.rendezvous.node_rank,
        host=socket.gethostname(),
        processes=job.local_world_size,
        same=same,
    )


def digest(function: Any) -> str:
    """Return a short digest of a function's code, wherever it is defined; of what it uses nothing is in it."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    made = hashlib.sha256()
    _add(made, code)
    return made.hexdigest()[:_DIGITS]


def _add(made: Any, value: object) -> None:
    """Add a constant; sets have no order of their own, code is taken without its lines and file."""
    if isinstance(value, types.CodeType):
        made.update(value.co_code)
        for part in (*value.co_consts, value.co_names, value.co_varnames, value.co_freevars):
            _add(made, part)
    elif isinstance(value, frozenset):
        made.update(repr(sorted(map(repr, value))).encode())
    else:
        made.update(repr(value).encode())


def disagreements(cards: Sequence[Card], *, complete: bool) -> list[str]:
    """Return a line for each option that nodes do not have alike; those that hinder the meeting if not `complete`."""
    lines = []
    names = cards[0].same if complete else _UNTIL_SAME
    python = {card.same.get("Python") for card in cards}
    for name in names:
        values = [card.same.get(name, "unknown") for card in cards]
        if name == "the function" and len(python) > 1:
            continue  # its code is another one in another Python
        if len(set(values)) > 1:
            parts = [f"{value} on {card.name}" for value, card in zip(values, cards, strict=True)]
            lines.append(f"{name}: " + "; ".join(parts))
    return lines


def twice(cards: Sequence[Card]) -> list[str]:
    """Return a line for each rank that several nodes have."""
    counts = Counter(card.node_rank for card in cards)
    return [
        f"node_rank={rank} was given {count} times, on "
        + " and ".join(card.host for card in cards if card.node_rank == rank)
        + ": each node needs its own"
        for rank, count in sorted(counts.items())
        if count > 1
    ]
