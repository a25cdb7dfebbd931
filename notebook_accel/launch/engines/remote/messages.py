"""What notebook and agent say to each other besides events and orders of ranks; all of it has the rank -1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


# -- runs that outlive the notebook


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveOrder(Order):
    """Start a process that drives a run without the notebook; answered by `Driven`.

    Attributes:
        work: a pickled `driver.Work`.
    """

    work: Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Driven(Event):
    """The process is there, and waits for the agents of all hosts.

    Attributes:
        number: of the run on this host.
        port: where the process listens.
        token: what agents prove.
        remark: what will end the run all the same, as a sentence; empty where nothing is known.
        problem: why there is none, empty where there is one.
    """

    number: str = ""
    port: int = 0
    token: bytes = b""
    remark: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinOrder(Order):
    """Serve the process that drives a run, and no longer the notebook; answered by `Joined`.

    Attributes:
        addresses: of its host, the likeliest first.
        port: where it listens.
        token: what this agent proves.
        number: of this host.
    """

    addresses: Sequence[str]
    port: int
    token: bytes
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined(Event):
    """The agent has a connection to the process that drives the run, or not.

    Attributes:
        problem: why not, empty where it has.
    """

    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOrder(Order):
    """Send the events of a run on this host, until the connection ends; answered by `Watched`.

    Attributes:
        run: its number or name; None is the one that was launched last.
    """

    run: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched(Event):
    """The events follow.

    Attributes:
        number: of the run.
        path: of its folder.
        metadata: see `Folder.read_metadata`.
        files: content of those that have what runs, by name.
        problem: why there is no such run, empty where there is one.
    """

    number: str = ""
    path: str = ""
    metadata: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing(Event):
    """All events until now are sent.

    Attributes:
        is_held: whether the process that drives the run lived before they were read.
        has_restarted: whether the machine was started again since the launch.
        stop: seconds that ranks have, where somebody has asked the run to stop; else None.
        log: of a process that has ended, the last lines of what it has written itself.
    """

    is_held: bool
    has_restarted: bool
    stop: float | None
    log: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOrder(Order):
    """Ask the run that is watched to stop.

    Attributes:
        grace: seconds that its ranks have.
    """

    grace: float
