"""What workers and the notebook tell each other, as frozen values, and the bytes of one of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Buffer = bytes | bytearray | memoryview | pickle.PickleBuffer  # a memoryview cannot be sent
Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened on `rank` at `time` (seconds since the epoch, the worker's clock)."""

    rank: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(Event):
    """One whole line of output, without its newline."""

    stream: Stream
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk(Event):
    """Output as it was written, cut anywhere; the inbox makes lines of it."""

    stream: Stream
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Event):
    """The state of a progress bar; `total` is None where it is unknown, `text` is the bar as tqdm draws it."""

    bar: int
    description: str
    count: float
    total: float | None
    text: str
    finished: bool = False
    leave: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric(Event):
    """Named numbers of one step."""

    values: Mapping[str, float]
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Display(Event):
    """A MIME bundle for the cell; `update` changes the display with the same `transient['display_id']`."""

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transient: Mapping[str, Any] = field(default_factory=dict)
    update: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearOutput(Event):
    """A request to clear the cell's output, at once or (`wait`) when the next output comes."""

    wait: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse(Event):
    """How far a rank has come; sent when it changed, twice a second at most.

    Attributes:
        steps: optimizer steps so far.
        epoch, batch, batches: where the prepared loader that is being read stands, counted from 0 and from 1;
            `batches` is None where nobody knows its length, `batch` 0 where none is being read.
        waiting: the collective that the rank's main thread is in, empty where it is in none.
    """

    steps: int = 0
    epoch: int = 0
    batch: int = 0
    batches: int | None = None
    waiting: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held(Event):
    """A rank waits to be told where to stop; it has asked `questions` times."""

    questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Event):
    """What the notebook tells a worker; `rank` is the one told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldOrder(Order):
    """Say how often you asked whether to stop, and ask no more until you are told where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopOrder(Order):
    """Stop at this question."""

    question: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginOrder(Order):
    """Call the function: all ranks are there. For whoever holds a worker's process on another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalOrder(Order):
    """Send a signal to the worker, SIGKILL to all that it started too. For whoever holds its process elsewhere."""

    signum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOrder(Order):
    """Call a function: `work` is the pickle of the function with its arguments, with its out-of-band buffers.

    `sources` are lines of cells that the worker has not been told yet, by file name.
    """

    call: int
    work: Buffer
    buffers: Sequence[Buffer] = ()
    sends_value: bool
    sources: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptOrder(Order):
    """Raise KeyboardInterrupt in this call, where it has not ended."""

    call: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseOrder(Order):
    """End the wait for other ranks that this call may be in; `pids` are those of all ranks."""

    call: int
    pids: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WhereOrder(Order):
    """Say where this call of a session is, or without one (`call` 0) the launched function."""

    call: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOrder(Order):
    """End, after the calls that were ordered before."""


PhaseName = Literal["starting", "running", "done", "failed", "restarting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Event):
    """A rank reached a phase of its life; `rank` -1 speaks of the whole run, `pid` is the rank's where it says so."""

    name: PhaseName
    detail: str = ""
    pid: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a worker's traceback.

    `first_lineno` is the line its function starts at. `columns` are end line, start and end column of the
    expression, where Python (3.11 on) knows them.
    """

    filename: str
    lineno: int
    first_lineno: int
    name: str
    qualname: str
    columns: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedError:
    """An exception in transit: how to make it again, or its name and text where it cannot be made again.

    `parts` are those of an exception group.
    """

    type_name: str
    message: str
    pickled: bytes | None
    frames: Sequence[Frame]
    notes: Sequence[str] = ()
    parts: Sequence[RaisedError] = ()
    cause: RaisedError | None = None
    context: RaisedError | None = None
    suppress_context: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Event):
    """The rank's function raised, or its process ended without a word: then `error` is None.

    `exitcode` is the process's, negative for a signal, as in `multiprocessing`. `lost` says what became of a process
    whose end nobody saw: its node may have died.
    """

    pid: int
    error: RaisedError | None = None
    exitcode: int | None = None
    lost: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Event):
    """The rank's function returned; `value` is the pickled value with its out-of-band buffers."""

    value: bytes
    buffers: Sequence[Buffer] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Event):
    """The rank's process, on another machine, has ended, and all that it said came before this."""

    pid: int
    exitcode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd(Event):
    """A call of a session returned or raised on a rank.

    `positions` are the numbers of collectives so far by process group; None where the rank is in no group any more.
    """

    call: int
    outcome: Result | Failure
    positions: Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice(Event):
    """What the launcher itself has to say of the run; `rank` is -1."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A collective in torch's flight recorder.

    Attributes:
        name: with its backend, such as `gloo:all_reduce`.
        number: which of its process group it is, counted from 1; ranks that wait for each other have the same.
        group: the process group's description, or its name.
        inputs: shapes and types of the tensors that went in.
        is_over: whether it has ended.
    """

    name: str
    number: int
    group: str
    inputs: str
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Where(Event):
    """What a rank's main thread does, in a call of a session or in the launched function (`call` 0).

    Attributes:
        collective: that it waits in, or `backward`; empty where it is in neither.
        seconds: how long its stack has looked like this, as far as somebody looked.
        frames: the user's, outermost first.
        recorded: what torch's flight recorder has of collectives that are under way, else of the last one.
    """

    call: int = 0
    collective: str
    seconds: float
    frames: Sequence[Frame]
    recorded: Sequence[Recorded] = ()


def encode(event: Event) -> list[Buffer]:
    """Return the event's bytes: its pickle, then the out-of-band buffers (not copied)."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(event, protocol=5, buffer_callback=buffers.append)
    return [head, *buffers]


def decode(parts: Sequence[Buffer]) -> Event:
    """Make an event again from the parts that `encode` returned; only for bytes of our own workers."""
    event = pickle.loads(parts[0], buffers=parts[1:])
    assert isinstance(event, Event)
    return event
