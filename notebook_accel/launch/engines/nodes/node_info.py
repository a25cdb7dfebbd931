"""What a node says of itself when nodes meet, and what all nodes must have alike."""

from __future__ import annotations

import dis
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
from ...checks.node_options import format_count
from ...job import Job

_DIGITS: Final = 12
_MOST: Final = 1 << 20  # of nodes, and of a node's processes
_MOST_PORTS: Final = 1 << 16
_LONGEST_HOST: Final = 255  # characters of a host's name
_JUMPS: Final = frozenset({*dis.hasjrel, *dis.hasjabs})
# Python calls `module.function()` in one way where the same file imports the module, and in another in a notebook,
# whose statements are compiled one by one. A function is to have one hash in both.
_OF_CALLS: Final = frozenset({"CACHE", "NOP", "PRECALL", "PUSH_NULL"})
_UNTIL_SAME: Final = ("num_nodes", "rdzv_id")  # nodes that differ in it may wait for each other for ever


@dataclass(frozen=True, kw_only=True)
class NodeInfo:
    """A node of a run.

    Attributes:
        node_rank: its number; -1 for a node that is not let into the run yet, where nodes come and go.
        host: its host name.
        processes: how many ranks it has.
        same: what all nodes must have alike, as text by option.
    """

    node_rank: int
    host: str
    processes: int
    same: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (
            -1 <= self.node_rank < _MOST and 1 <= self.processes < _MOST and len(self.host) <= _LONGEST_HOST
        ):
            raise ValueError(f"node {self.node_rank} with {self.processes} processes")

    @property
    def name(self) -> str:
        """The node's number and host, for messages."""
        return f"a new node ({self.host})" if self.node_rank < 0 else f"node {self.node_rank} ({self.host})"


@dataclass(frozen=True, kw_only=True)
class Roster:
    """The nodes of a run, once all are there.

    Attributes:
        node_rank: the rank of the node that this is sent to.
        host_rank: the rank of the node with the coordinator.
        nodes: all nodes, by rank.
        addresses: their IP addresses, by rank.
        port: of the store, on the node with the coordinator, where the workers meet.
        attempt: which start of the workers this is, counted from 0; more for a node that comes back.
    """

    node_rank: int
    host_rank: int
    nodes: Sequence[NodeInfo]
    addresses: Sequence[str]
    port: int
    attempt: int = 0

    def __post_init__(self) -> None:
        count = len(self.nodes)
        if not (
            0 <= self.node_rank < count
            and 0 <= self.host_rank < count
            and len(self.addresses) == count
            and 0 < self.port < _MOST_PORTS
            and 0 <= self.attempt < _MOST
        ):
            raise ValueError(f"ranks {self.node_rank} and {self.host_rank} of {count} nodes")


def describe_node(job: Job) -> NodeInfo:
    """Return what this node says of itself.

    Args:
        job: what it is to run.
    """
    same = {
        "rdzv_id": job.rendezvous.run_id,
        "num_nodes": format_count(job.rendezvous),
        "max_restarts": str(job.max_restarts),
        "mixed_precision": job.mixed_precision,
        "returns": job.returns,
        "notebook_accel": probes.version("notebook-accel") or "not installed",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "the function": f"{job.name}, code {hash_code(job.function)}",
    }
    return NodeInfo(
        node_rank=job.rendezvous.node_rank,
        host=socket.gethostname(),
        processes=job.local_world_size,
        same=same,
    )


def hash_code(function: Any) -> str:
    """Return a short hash of a function's own code; the code that it calls does not count."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    sha = hashlib.sha256()
    _add(sha, code)
    return sha.hexdigest()[:_DIGITS]


def _add(sha: Any, value: object) -> None:
    """Add a constant to a hash: sets in a fixed order, code without its lines and file."""
    if isinstance(value, types.CodeType):
        for each in dis.get_instructions(value):
            if each.opname not in _OF_CALLS:
                sha.update(each.opname.replace("METHOD", "ATTR").encode())
                _add(sha, None if each.opcode in _JUMPS else each.argval)
        _add(sha, value.co_varnames)
    elif isinstance(value, frozenset):
        sha.update(repr(sorted(map(repr, value))).encode())
    else:
        sha.update(repr(value).encode())


def find_disagreements(nodes: Sequence[NodeInfo], *, complete: bool) -> list[str]:
    """Return a line for each option that nodes do not have alike.

    Args:
        nodes: those that are there, at least one.
        complete: whether all are there. Before that, only options count that would let nodes wait for ever.
    """
    lines = []
    names = nodes[0].same if complete else _UNTIL_SAME
    python = {node.same.get("Python") for node in nodes}
    for name in names:
        values = [node.same.get(name, "unknown") for node in nodes]
        if name == "the function" and len(python) > 1:
            continue  # its code is another one in another Python
        if len(set(values)) > 1:
            parts = [f"{value} on {node.name}" for value, node in zip(values, nodes, strict=True)]
            lines.append(f"{name}: " + "; ".join(parts))
    return lines


def find_duplicates(nodes: Sequence[NodeInfo]) -> list[str]:
    """Return a line for each node rank that several nodes have."""
    counts = Counter(node.node_rank for node in nodes)
    return [
        f"node_rank={rank} was given {count} times, on "
        + " and ".join(node.host for node in nodes if node.node_rank == rank)
        + ": each node needs its own"
        for rank, count in sorted(counts.items())
        if count > 1
    ]
