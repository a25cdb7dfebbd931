"""Picture: what a view shows of a run at one moment, as plain values without widgets and HTML."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from notebook_accel import probes
from notebook_accel.errors import RunStoppedError
from notebook_accel.events import Display, Event, Failure, Line, Progress, Pulse, Unfinished
from notebook_accel.launch.run import Run
from notebook_accel.launch.run import Status as RunStatus
from notebook_accel.launch.transfer import failures
from notebook_accel.stream.record import RunRecord
from notebook_accel.stream.series import Point

RankStatus = Literal[
    "queued", "starting", "running", "waiting", "done", "failed", "killed", "stopped", "left"
]

EventT = TypeVar("EventT", bound=Event)

_WAITING_SECONDS: Final = 1.0  # shorter waits happen in every step
_OVER: Final = ("done", "failed", "stopped", "left")
BAD: Final = ("failed", "killed")  # of a rank
_MAX_BARS: Final = 6  # for each rank
MOST_OUTPUTS: Final = 64
"""With more ranks, the lines of some are shown: of the first ones, and of those that failed."""
_SOME_OUTPUTS: Final = 16
MAX_WIDTH: Final = 2000  # characters of a line in the live view


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What the process of a rank uses. Each value is None if it is not known.

    Attributes:
        memory: resident memory in bytes.
        cpu: percent of one core.
        device_memory: memory on its device in bytes.
        device: load of its device in percent.
    """

    memory: int | None = None
    cpu: float | None = None
    device_memory: int | None = None
    device: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """The state of one rank.

    Attributes:
        rank: its rank.
        status: its status; `waiting` is a rank that waits in a collective.
        waiting: name of that collective; empty if it is not waiting.
        waited: seconds for which it has been waiting.
        step: optimizer steps so far; None without any.
        rate: optimizer steps in a second; None if it is not known.
        usage: what its process uses; None if it is not known.
        node: the host or node that it is on, for a launch on hosts or a cluster; else empty.
        note: what happened, if it failed; empty otherwise.
        detail: what a library said of that, where the note does not.
    """

    rank: int
    status: RankStatus
    waiting: str = ""
    waited: float = 0.0
    step: int | None = None
    rate: float | None = None
    usage: Usage | None = None
    node: str = ""
    note: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A progress bar.

    Attributes:
        label: what it counts, such as `epoch 2`.
        text: how far it is, such as `batch 5 of 20`.
        fraction: from 0 to 1; None if the total is not known.
    """

    label: str
    text: str
    fraction: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The output of a rank.

    Attributes:
        total: how many lines it has written.
        lines: the newest of them.
        unfinished: what it has written since, where no newline has ended it.
        head: the first of them, where some between these and the newest are left out.
        alike: how many are left out because all ranks have written the same, and the first one has them.
        shared: those of the first rank, as stream and text.
        forgotten: how many are left out at least because the record of the run has dropped them.
        width: characters that are shown of a line at most.
    """

    total: int = 0
    lines: tuple[Line, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    head: tuple[Line, ...] = ()
    alike: int = 0
    shared: frozenset[tuple[str, str]] = frozenset()
    forgotten: int = 0
    width: int = MAX_WIDTH

    @property
    def is_cut(self) -> bool:
        """Whether lines are longer than what is shown of them."""
        return any(len(row.text) > self.width for row in (*self.head, *self.rows))

    @property
    def hidden(self) -> int:
        """How many lines are left out for want of room."""
        return max(0, self.total - self.alike - len(self.head) - len(self.lines))

    @property
    def rows(self) -> tuple[Line | Unfinished, ...]:
        """The newest lines, and below them what is unfinished."""
        return self.lines + self.unfinished


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureSummary:
    """The failure that came first.

    Attributes:
        title: type and message of the exception.
        traceback: as IPython prints it, with ANSI colours; empty if the cell shows it.
        others: one line for each other rank about what happened to it.
    """

    title: str
    traceback: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A run at one moment.

    Attributes:
        name: name of the function.
        number: its number among the runs of the notebook; 0 if `runs()` does not list it.
        status: status of the run.
        seconds: how long the run has lasted.
        started: when it was launched, in seconds since the epoch.
        background: whether the launch returned at once.
        distributed: whether worker processes run the function.
        stopping: whether somebody asked it to stop and it still runs.
        restarts: how many times all ranks were started again.
        ranks: the state of each rank.
        bars: progress bars by rank, for ranks that have bars.
        slowest: among these the rank that is furthest behind; None without bars.
        outputs: output by rank, for ranks whose output is to be shown.
        metrics: the points of each metric, oldest first.
        measured: the ranks that have metrics.
        rank_metrics: the points of each metric of the ranks that are laid over each other; empty where none are.
        history: what was measured of ranks so far: points by rank, or `most` and so on of many, and by quantity.
        displays: figures and other displays of the ranks, oldest first.
        failure: the failure that came first; None without one.
        notice: the last message of the launcher itself; empty without one.
        log_dir: the folder with the lines of all ranks; empty without one.
        hidden_outputs: of how many ranks the output is left out, because there are too many.
        cause: the rank that failed first; None where none has.
    """

    name: str
    status: RunStatus
    seconds: float
    started: float
    background: bool = False
    distributed: bool = True
    stopping: bool = False
    restarts: int = 0
    ranks: tuple[RankState, ...] = ()
    bars: Mapping[int, tuple[Bar, ...]] = field(default_factory=dict)
    slowest: int | None = None
    outputs: Mapping[int, Output] = field(default_factory=dict)
    metrics: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)
    measured: tuple[int, ...] = ()
    rank_metrics: Mapping[int, Mapping[str, Sequence[Point]]] = field(default_factory=dict)
    history: Mapping[str, Mapping[str, tuple[Point, ...]]] = field(default_factory=dict)
    displays: tuple[Display, ...] = ()
    failure: FailureSummary | None = None
    notice: str = ""
    log_dir: str = ""
    hidden_outputs: int = 0
    number: int = 0
    cause: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in _OVER

    def find_status(self, rank: int) -> RankStatus | None:
        """Return the status of a rank; None if it is not known.

        Args:
            rank: which one.
        """
        return next((state.status for state in self.ranks if state.rank == rank), None)


def sort_ranks(picture: Picture) -> list[int]:
    """Return the ranks whose output is to be shown: what failed first, then what failed besides, then the others.

    Args:
        picture: the run.
    """
    bad = {state.rank for state in picture.ranks if state.status in BAD}
    return sorted(picture.outputs, key=lambda rank: (rank != picture.cause, rank not in bad, rank))


def make_picture(
    run: Run,
    usage: Mapping[int, Usage] | None = None,
    history: Mapping[str, Mapping[str, tuple[Point, ...]]] | None = None,
) -> Picture:
    """Return the picture of a run as it is now. It may be called in any thread.

    Args:
        run: the run.
        usage: what the processes use, by rank; None if it is not known.
        history: what they have used so far, see `Picture.history`; None if it is not known.
    """
    record, job = run.record, run.job
    status = run.status
    over = status in _OVER
    ranks = _list_ranks(run)
    failed = _find_failed(record)
    wanted = _select_shown(job.output, ranks)
    shown = limit_shown(wanted, failed)
    drawn = group_by_rank(list(record.progress.values()))
    chosen, nothing = set(shown), list[Progress]()
    bars = {
        rank: found
        for rank in ranks
        if (found := _make_bars(record, rank, drawn.get(rank, nothing) if rank in chosen else nothing, over))
    }
    unfinished = group_by_rank(list(record.unfinished.values()))
    cause = _find_cause(run)
    return Picture(
        name=job.name,
        number=run.number,
        status=status,
        seconds=run.seconds,
        started=run.started,
        background=job.background,
        distributed=job.distributed,
        stopping=run.stop_is_asked and not over,
        restarts=record.restarts,
        ranks=tuple(
            _make_state(run, rank, status, (usage or {}).get(rank), failed.get(rank), cause) for rank in ranks
        ),
        bars=bars,
        slowest=min(
            bars, key=lambda rank: _measure_progress(record, rank, drawn.get(rank, nothing)), default=None
        ),
        outputs={rank: _make_output(record, rank, unfinished.get(rank, ())) for rank in shown},
        metrics={name: tuple(points) for name, points in list(record.metrics.items())},
        measured=tuple(record.measured_ranks),
        history=history or {},
        displays=tuple(event for (rank, _), event in list(record.displays.items()) if rank in chosen),
        failure=_summarize_failure(run),
        notice="" if run.is_over and not run.failure else record.notice,
        log_dir="" if job.log_dir is None else os.fspath(job.log_dir),
        hidden_outputs=len(wanted) - len(shown),
        cause=None if cause is None else cause.rank,
    )


def group_by_rank(events: Iterable[EventT]) -> dict[int, list[EventT]]:
    """Return events by rank, in their order.

    Args:
        events: of all ranks.
    """
    found: dict[int, list[EventT]] = {}
    for event in events:
        found.setdefault(event.rank, []).append(event)
    return found


def limit_shown(ranks: Sequence[int], failed: Collection[int]) -> Sequence[int]:
    """Return the ranks whose output is shown; of many, the first ones that failed and the first others.

    Args:
        ranks: that are to be shown, in order.
        failed: ranks that failed.
    """
    if len(ranks) <= MOST_OUTPUTS:
        return ranks
    worst = [rank for rank in ranks if rank in failed][: _SOME_OUTPUTS // 2]
    others = [rank for rank in ranks[:_SOME_OUTPUTS] if rank not in worst]
    return sorted([*worst, *others[: _SOME_OUTPUTS - len(worst)]])


def _find_failed(record: RunRecord) -> dict[int, Failure]:
    """Return the first failure of each rank that has one."""
    found: dict[int, Failure] = {}
    for failure in list(record.failures):
        found.setdefault(failure.rank, failure)
    return found


def _make_output(record: RunRecord, rank: int, unfinished: Iterable[Unfinished]) -> Output:
    return Output(
        total=record.line_counts.get(rank, 0),
        lines=tuple(record.find_tail(rank)),
        unfinished=tuple(event for event in unfinished if event.text.strip()),
    )


def _list_ranks(run: Run) -> list[int]:
    known = {rank for rank in list(run.record.phases) if rank >= 0}
    if run.job.rendezvous.num_nodes == 1:
        known |= set(range(run.job.local_world_size))
    return sorted(known)


def _select_shown(output: Any, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose output is to be shown."""
    if isinstance(output, str):
        return {"all": list(ranks), "first": list(ranks[:1]), "none": []}[output]
    return [rank for rank in ranks if rank in output]


def _find_cause(run: Run) -> Failure | None:
    """Return the first failure: as the outcome says, which knows other nodes, or of those so far."""
    found = list(run.record.failures)
    return run.first_failure or (failures.find_first(found) if found else None)


def _make_state(
    run: Run,
    rank: int,
    status: RunStatus,
    usage: Usage | None,
    failure: Failure | None,
    cause: Failure | None,
) -> RankState:
    record = run.record
    pulse = record.pulses.get(rank)
    state = _resolve_status(run, rank, status, failure)
    waited = _measure_since(pulse) if state == "running" and pulse is not None and pulse.waiting else 0.0
    waits = waited >= _WAITING_SECONDS
    return RankState(
        rank=rank,
        status="waiting" if waits else state,
        waiting=pulse.waiting if waits and pulse is not None else "",
        waited=waited if waits else 0.0,
        step=pulse.steps if pulse is not None and pulse.steps else None,
        rate=_measure_rate(record, rank, state),
        usage=usage,
        node=record.nodes.get(rank, ""),
        note=_describe_failure(failure, cause),
        detail="" if failure is None else failures.describe_library(failure, cause),
    )


def _measure_since(pulse: Pulse) -> float:
    return time.time() - pulse.time if pulse.moment is None else time.monotonic() - pulse.moment


def _resolve_status(run: Run, rank: int, status: RunStatus, failure: Failure | None) -> RankStatus:
    if failure is not None:
        return "killed" if failure.error is None and (failure.exitcode or 0) < 0 else "failed"
    if not run.job.distributed:
        return status
    if rank in run.record.results:
        return "done"
    if status in _OVER:
        return "left" if status == "left" else "stopped"
    phase = run.record.phases.get(rank)
    return "running" if phase is not None and phase.name == "running" else "starting"


def _measure_rate(record: RunRecord, rank: int, state: RankStatus) -> float | None:
    """Return steps a second: over the last steps while the rank runs, over all steps at the end."""
    pulse, phase = record.pulses.get(rank), record.phases.get(rank)
    if state in ("starting", "running") or pulse is None or phase is None:
        return record.pace(rank)
    seconds = pulse.time - phase.time
    return pulse.steps / seconds if pulse.steps and seconds > 0 else None


def _describe_failure(failure: Failure | None, cause: Failure | None) -> str:
    if failure is None:
        return ""
    return failures.describe_failure(failure, cause).removeprefix(
        f"rank {failure.rank} (process {failure.pid}) "
    )


# -- progress


def _make_bars(record: RunRecord, rank: int, own: Iterable[Progress], over: bool) -> tuple[Bar, ...]:
    pulse = record.pulses.get(rank)
    found = [] if pulse is None or not pulse.batch or over else [_make_loader_bar(pulse)]
    drawn: dict[tuple[str, int], Progress] = {}  # of bars with one name that followed each other, the newest
    for bar in sorted(own, key=lambda bar: bar.bar):
        if bar.leave or not bar.finished:
            drawn[bar.description, bar.position] = bar
    newest = sorted(drawn.values(), key=lambda bar: (not bar.finished, bar.bar))[-_MAX_BARS:]
    return (*found, *map(_make_tqdm_bar, sorted(newest, key=lambda bar: bar.bar)))


def _make_loader_bar(pulse: Pulse) -> Bar:
    known = bool(pulse.batches)
    return Bar(
        label=f"epoch {pulse.epoch + 1}",
        text=f"batch {pulse.batch}" + (f" of {pulse.batches}" if known else ""),
        fraction=min(1.0, pulse.batch / pulse.batches) if pulse.batches else None,
    )


def _make_tqdm_bar(bar: Progress) -> Bar:
    """Return a bar of tqdm. Its text loses the part that tqdm draws with block characters."""
    start, drawn, rest = bar.text.rpartition("|")
    text = rest if drawn else start + rest
    return Bar(
        label=bar.description,
        text=text.strip().removeprefix(f"{bar.description}: "),
        fraction=min(1.0, bar.count / bar.total) if bar.total else None,
    )


def _measure_progress(record: RunRecord, rank: int, own: Iterable[Progress]) -> tuple[float, ...]:
    """Return how far a rank has come, as a key to compare it with other ranks."""
    pulse = record.pulses.get(rank)
    counts = record.passed.get(rank, 0.0)
    counts += sum(bar.count for bar in own)
    if pulse is None:
        return (0, 0, 0, counts, rank)
    return (pulse.steps, pulse.epoch, pulse.batch, counts, rank)


# -- failures


def _summarize_failure(run: Run) -> FailureSummary | None:
    error = run.failure
    if error is None:
        found = list(run.record.failures)
        return FailureSummary(title=failures.describe_failure(failures.find_first(found))) if found else None
    if isinstance(error, (RunStoppedError, KeyboardInterrupt)):
        return None
    title = failures.describe_error(error)
    if not run.job.background:
        return FailureSummary(title=title)  # the cell shows the rest
    text = format_traceback(error)
    others = tuple(note for note in run.notes if note not in text)
    return FailureSummary(title=title, traceback=text, others=others)


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an exception as IPython prints it; without IPython as Python prints it.

    Args:
        error: the exception.
    """
    shell = probes.find_shell()
    if shell is None:
        import traceback

        return "".join(traceback.format_exception(error)).rstrip("\n")
    from copy import copy

    formatter = copy(
        shell.InteractiveTB
    )  # a copy, because the formatter keeps the last traceback for the debugger
    own: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    parts = own() if own is not None else None
    if parts is None:
        parts = formatter.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)
    return "\n".join(parts)
