"""Messages between workers and the notebook, as frozen dataclasses."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NewType

Buffer = bytes | bytearray | memoryview | pickle.PickleBuffer  # a memoryview cannot be pickled
Pickle = NewType("Pickle", bytes)
"""A pickle inside of an event. Loading it may run any code: it travels between processes that trust each other."""
Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened in a run.

    Attributes:
        rank: where; -1 for the whole run.
        time: when, in seconds since the epoch by the worker's clock.
    """

    rank: int
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines(Event):
    """Lines of output that came together, at least one: they travel so, and are kept so.

    Attributes:
        stream: where they were written.
        texts: the lines without their newlines.
    """

    stream: Stream
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line(Event):
    """One line of output, as records return it.

    Attributes:
        stream: where it was written.
        text: the line without its newline.
    """

    stream: Stream
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished(Event):
    """What was written since the last line, such as a bar or a question; the next `Lines` of the stream replace it.

    Attributes:
        stream: where it was written.
        text: one row or several, as a terminal shows them; may be empty.
    """

    stream: Stream
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Event):
    """The state of a progress bar.

    Attributes:
        bar: number of the bar in its process.
        position: how many open bars stood above it when it began: more than 0 for a nested one.
        description: the bar's label.
        count: how far it is.
        total: its end, None where it is unknown.
        text: the bar as tqdm draws it.
        finished: whether this is its last state.
        leave: whether it stays visible after its end.
    """

    bar: int
    description: str
    count: float
    total: float | None
    text: str
    finished: bool = False
    leave: bool = True
    position: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric(Event):
    """The numbers of one step.

    Attributes:
        values: numbers by name.
        step: number of the step, None where it has none.
    """

    values: Mapping[str, float]
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Display(Event):
    """A rich output for the cell.

    Attributes:
        data: the MIME bundle.
        metadata: of the bundle.
        transient: may have a `display_id`.
        update: replace the display with the same `display_id`.
    """

    data: Mapping[str, Any]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    transient: Mapping[str, Any] = field(default_factory=dict)
    update: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ClearOutput(Event):
    """A request to clear the output of the cell.

    Attributes:
        wait: clear it when the next output comes, not at once.
    """

    wait: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulse(Event):
    """The progress of a rank; sent when it changes, at most twice a second.

    Attributes:
        steps: optimizer steps so far.
        epoch: of the prepared loader that is being read, from 0.
        batch: of that loader, from 1; 0 if none is being read.
        batches: number of batches of that loader, None where it is unknown.
        waiting: the collective in which the rank's main thread waits; empty if it waits in none.
        moment: when, by the monotonic clock of this machine, which never jumps; None of another machine.
    """

    steps: int = 0
    epoch: int = 0
    batch: int = 0
    batches: int | None = None
    waiting: str = ""
    moment: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Save(Event):
    """A rank writes a checkpoint, `name`, in the background; until `is_over`, `folders` are what there is of it."""

    name: str
    folders: Sequence[str]
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Held(Event):
    """A rank waits to learn where to stop.

    Attributes:
        questions: how often it has asked whether to stop.
    """

    questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Event):
    """An order from the notebook to a worker; `rank` is the worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldOrder(Order):
    """Let the next question whether to stop wait, and answer with `Held`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopOrder(Order):
    """Stop.

    Attributes:
        question: the number of the question that is answered by yes.
    """

    question: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BeginOrder(Order):
    """Call the function, because all ranks are ready; for the owner of a worker's process on another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignalOrder(Order):
    """Send a signal to a worker; for the owner of its process on another machine.

    Attributes:
        signum: number of the signal. SIGKILL goes to all processes that the worker started too.
    """

    signum: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOrder(Order):
    """Call a function.

    Attributes:
        call: number of the call.
        work: the pickled function and arguments.
        buffers: out-of-band buffers of the pickle.
        sends_value: whether this rank returns the value.
        sources: lines of cells that the worker does not have yet, by file name.
        as_accelerate: whether imports of Accelerate give this package in the notebook, and shall do so here.
    """

    call: int
    work: Buffer
    buffers: Sequence[Buffer] = ()
    sends_value: bool
    as_accelerate: bool = False
    sources: Mapping[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class InterruptOrder(Order):
    """Raise KeyboardInterrupt in a call that has not ended.

    Attributes:
        call: number of the call.
        pids: process ids of the ranks to which connections are closed before, as a thread may wait for one in C code.
        addresses: of the machines that the ranks are on; empty where they are all on one.
    """

    call: int
    pids: Sequence[int] = ()
    addresses: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StackOrder(Order):
    """Answer with `StackReport`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOrder(Order):
    """Write out what was printed without a newline, because the process is about to be ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveOrder(Order):
    """End the process after all earlier calls."""


PhaseName = Literal["queued", "starting", "running", "done", "failed", "restarting"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Event):
    """A rank, or with rank -1 the whole run, enters a phase.

    Attributes:
        name: of the phase.
        detail: a sentence for the reader.
        pid: process id of the rank, None where it is not sent.
        node: the host or node of a rank that was launched on hosts or a cluster, as its user names it; else empty.
    """

    name: PhaseName
    detail: str = ""
    pid: int | None = None
    node: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One frame of a worker's traceback.

    Attributes:
        filename: of the code.
        lineno: the line, from 1.
        first_lineno: the line at which its function starts.
        name: of the function.
        qualname: of the function, with its classes.
        columns: end line, start column and end column of the expression; None before Python 3.11.
    """

    filename: str
    lineno: int
    first_lineno: int
    name: str
    qualname: str
    columns: tuple[int, int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RaisedError:
    """An exception that is sent to the notebook.

    Attributes:
        type_name: name of its class.
        message: its text.
        pickled: the pickled exception, None if it cannot be pickled.
        frames: its traceback, outermost frame first.
        arguments: what it was made with, where its class is one of Python's own and they are plain; else None.
        notes: see `BaseException.add_note`.
        parts: the exceptions of a group.
        cause: its `__cause__`.
        context: its `__context__`.
        suppress_context: its `__suppress_context__`.
    """

    type_name: str
    message: str
    pickled: Pickle | None
    frames: Sequence[Frame]
    arguments: Sequence[str | int | float | bool | None] | None = None
    notes: Sequence[str] = ()
    parts: Sequence[RaisedError] = ()
    cause: RaisedError | None = None
    context: RaisedError | None = None
    suppress_context: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(Event):
    """The function of a rank raised, or its process ended without an exception.

    Attributes:
        pid: process id of the rank.
        error: the exception, None if there was none.
        exitcode: of the process, negative for a signal, as in `multiprocessing`; None where it is not known.
        lost: a sentence about a process whose end was not seen, because its node may have died; else empty.
        killer: why a signal has ended it, as a clause, where the system or its last words say so; else empty.
        moment: when it happened by the monotonic clock of this machine, which never jumps; None of another machine.
        alive: when the process was last seen alive, by that clock, which may be long before its end was noticed; None
            where nobody looked.
        node: the host or node of the process, where a run has several or another than the notebook's; else empty.
    """

    pid: int
    error: RaisedError | None = None
    exitcode: int | None = None
    lost: str = ""
    killer: str = ""
    moment: float | None = None
    alive: float | None = None
    node: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traceback(Event):
    """A script raised; `text` is what it would have shown by itself."""

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result(Event):
    """The function of a rank returned.

    Attributes:
        value: the pickled value.
        buffers: out-of-band buffers of the pickle.
    """

    value: bytes
    buffers: Sequence[Buffer] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(Event):
    """The process of a rank on another machine has ended; no event of it follows.

    Attributes:
        pid: its process id.
        exitcode: negative for a signal.
    """

    pid: int
    exitcode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallEnd(Event):
    """A call of a session returned or raised on a rank.

    Attributes:
        call: number of the call.
        outcome: how it ended.
        collectives: how many the call has begun, by process group; None if the rank has left its group.
    """

    call: int
    outcome: Result | Failure
    collectives: Mapping[str, int] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice(Event):
    """A message of the launcher about the run; `rank` is -1.

    Attributes:
        text: the message.
    """

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCollective:
    """A collective in torch's flight recorder.

    Attributes:
        name: backend and collective, such as `gloo:all_reduce`.
        number: its number in the process group, from 1; the ranks of one collective have the same number.
        group: description or name of the process group.
        inputs: shapes and dtypes of the input tensors.
        is_over: whether it has ended.
    """

    name: str
    number: int
    group: str
    inputs: str
    is_over: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StackReport(Event):
    """Where the main thread of a rank is.

    Attributes:
        collective: the collective in which it waits, or `backward`; empty if it is in neither.
        frames: frames of the user's code, outermost first.
        recorded: collectives in progress from torch's flight recorder, else the last one.
    """

    collective: str
    frames: Sequence[Frame]
    recorded: Sequence[RecordedCollective] = ()


def as_bytes(part: Buffer) -> memoryview:
    """Return the bytes of a buffer of any shape, which are not copied."""
    return pickle.PickleBuffer(part).raw()  # a memoryview can cast no shape with a zero
