"""What notebook and agent say to each other besides events and orders of ranks; all of it has the rank -1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....events import Buffer, Event, Order
from .rank_process import ProcessStart, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class LocateOrder(Order):
    """Find the address by which other hosts reach this one; answered by `Located`.

    Attributes:
        peers: addresses of the others, the likeliest first.
    """

    peers: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Located(Event):
    """The host's address.

    Attributes:
        address: from which the system there sends to the others.
        problem: why there is none, empty where there is one.
    """

    address: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOrder(Order):
    """Listen for other hosts, on the first one for the store of a run; answered by `Prepared`.

    Attributes:
        address: where.
        port: 0 is any free one.
    """

    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared(Event):
    """The agent listens.

    Attributes:
        port: where.
        problem: why it cannot, empty where it does.
    """

    port: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a host listens.

    Attributes:
        host: its name, for people.
        address: of the host.
        port: of the host.
    """

    host: str
    address: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReachOrder(Order):
    """See whether this host reaches others; answered by `Reached`.

    Attributes:
        places: where they listen.
    """

    places: Sequence[Place]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached(Event):
    """The host reaches the others, or not.

    Attributes:
        problem: why it does not, empty where it does.
    """

    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssignOrder(Order):
    """Start a process for each rank of the host; answered by `Assigned`.

    Attributes:
        start: how they start.
        works: what each has to do.
        data: the pickled function with its arguments.
        warm_seconds: how long the agent stays after them without a run.
        buffers: out-of-band buffers of the pickle.
    """

    start: ProcessStart
    works: Sequence[Work]
    data: Buffer
    warm_seconds: float
    buffers: Sequence[Buffer] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Assigned(Event):
    """The processes are there, and wait for the word to begin.

    Attributes:
        pids: their process ids by rank.
        problem: why they are not, empty where they are.
    """

    pids: Mapping[int, int]
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearOrder(Order):
    """Kill what is left of a run; answered by `Cleared`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cleared(Event):
    """Nothing is left of the run: the agent is free for another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices(Event):
    """What processes on the host compute on.

    Attributes:
        label: of the kind of devices, such as `CUDA`; empty for CPUs.
        count: how many there are; 0 for CPUs.
    """

    label: str
    count: int
