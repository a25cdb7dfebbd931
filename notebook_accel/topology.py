"""Topology: the rank of this process, and the number of processes and nodes of the run."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from . import environ


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The place of one process in a run.

    Attributes:
        rank: among all processes, from 0 to `world_size - 1`.
        local_rank: among the processes of this node, from 0 to `local_world_size - 1`.
        world_size: number of processes in the run.
        local_world_size: number of processes on this node.
        node_rank: of this node, from 0 to `num_nodes - 1`.
        num_nodes: number of nodes in the run.

    Raises:
        ValueError: the numbers contradict each other; the message shows the equation that does not hold.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        _require(self.world_size >= 1, f"WORLD_SIZE {self.world_size} < 1")
        _require(self.local_world_size >= 1, f"LOCAL_WORLD_SIZE {self.local_world_size} < 1")
        _require(self.num_nodes >= 1, f"GROUP_WORLD_SIZE {self.num_nodes} < 1")
        _below("RANK", self.rank, "WORLD_SIZE", self.world_size)
        _below("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size)
        _below("GROUP_RANK", self.node_rank, "GROUP_WORLD_SIZE", self.num_nodes)
        _require(
            self.local_world_size <= self.world_size,
            f"LOCAL_WORLD_SIZE {self.local_world_size} > WORLD_SIZE {self.world_size}",
        )
        _require(self.num_nodes <= self.world_size, f"{self.num_nodes} nodes > WORLD_SIZE {self.world_size}")
        _require(
            self.num_nodes > 1 or self.local_world_size == self.world_size,
            f"1 node x {self.local_world_size} processes != WORLD_SIZE {self.world_size}",
        )
        _require(self.local_rank <= self.rank, f"LOCAL_RANK {self.local_rank} > RANK {self.rank}")

    @property
    def is_main(self) -> bool:
        """True in rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True in the first process of each node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """True in the highest rank."""
        return self.rank == self.world_size - 1


def pretend(own: Topology, **numbers: int) -> Topology:
    """Return a topology with other numbers; they may contradict each other, as code sets them one by one.

    Args:
        own: the topology of this process.
        numbers: new ones by name.
    """
    made = copy.copy(own)
    for name, number in numbers.items():
        object.__setattr__(made, name, number)
    return made


def from_environ() -> Topology:
    """Return the topology that the variables of torchrun give; without WORLD_SIZE and RANK the process is alone.

    Missing variables get the values of a run on one node: LOCAL_RANK = RANK and LOCAL_WORLD_SIZE = WORLD_SIZE.

    Raises:
        ValueError: variables contradict each other; the message shows the equation: `RANK 3 >= WORLD_SIZE 2`.
    """
    world_size = environ.integer("WORLD_SIZE")
    rank = environ.integer("RANK")
    if world_size is None and rank is None:
        return Topology()
    if world_size is None or rank is None:
        present, absent = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        value = rank if world_size is None else world_size
        if value == (0 if world_size is None else 1):
            return Topology()
        raise ValueError(
            f"environment variable {present}={value} is set and {absent} is not: set both or none"
        )
    return _complete(rank, world_size)


def from_group(rank: int, world_size: int) -> Topology:
    """Return the topology of a process group that is open; variables that agree with it say which nodes there are.

    Args:
        rank: of this process in the group.
        world_size: number of processes in the group.

    Raises:
        ValueError: see `from_environ`.
    """
    if environ.integer("WORLD_SIZE") == world_size and environ.integer("RANK") == rank:
        return _complete(rank, world_size)
    return Topology(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)


def _complete(rank: int, world_size: int) -> Topology:
    local_world_size = environ.integer("LOCAL_WORLD_SIZE")
    local_rank = environ.integer("LOCAL_RANK")
    num_nodes = environ.integer("GROUP_WORLD_SIZE")
    node_rank = environ.integer("GROUP_RANK")
    if local_world_size is None:
        local_world_size = world_size // num_nodes if num_nodes else world_size
    if num_nodes is None:
        num_nodes = -(-world_size // local_world_size) if local_world_size > 0 else 1
    if local_rank is None:
        local_rank = rank % local_world_size if local_world_size > 0 else 0
    if node_rank is None:
        node_rank = (rank - local_rank) // local_world_size if local_world_size > 0 else 0
    return Topology(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
    )


def _below(name: str, value: int, limit_name: str, limit: int) -> None:
    _require(value >= 0, f"{name} {value} < 0")
    _require(value < limit, f"{name} {value} >= {limit_name} {limit}")


def _require(holds: bool, equation: str) -> None:
    if not holds:
        raise ValueError(f"the process topology is inconsistent: {equation}")
