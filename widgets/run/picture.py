"""What a view shows of a run at an instant, as plain values: no widget, no HTML."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from notebook_accel.errors import RunStoppedError
from notebook_accel.events import Display, Failure, Line, Progress, Pulse
from notebook_accel.launch import failures
from notebook_accel.launch.run import Run
from notebook_accel.launch.run import Status as RunStatus
from notebook_accel.stream.record import Point, RunRecord

RankStatus = Literal["starting", "running", "waiting", "done", "failed", "killed", "stopped"]

_WAITING_SECONDS: Final = 1.0  # shorter waits are every step's
_MAX_BARS: Final = 6  # of a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a rank uses: bytes of memory, and percent of a core and of its device; None where nobody can say."""

    memory: int | None = None
    cpu: float | None = None
    device_memory: int | None = None
    device: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """How one rank stands.

    Attributes:
        waiting: the collective that it has been in for `waited` seconds, empty where it is in none.
        step: optimizer steps so far, None where it made none.
        rate: steps in a second.
        note: what happened to it, where it failed.
    """

    rank: int
    status: RankStatus
    waiting: str = ""
    waited: float = 0.0
    step: int | None = None
    rate: float | None = None
    usage: Usage | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A progress bar; `fraction` is None where the total is unknown."""

    label: str
    text: str
    fraction: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The newest lines of a rank, of `total` that it has written."""

    total: int = 0
    lines: tuple[Line, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """The first failure: a title, the traceback as IPython prints it (with ANSI colours), a line for other ranks."""

    title: str
    traceback: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A run at an instant.

    Attributes:
        background: whether the notebook goes on meanwhile.
        stopping: whether it was asked to stop and still runs.
        bars: the bars of each rank that has some.
        restarts: how often all ranks were started again.
        slowest: the rank with bars that is behind the others.
        outputs: what each rank has written, where its output is to be shown.
        metrics: the points of each metric, oldest first.
        displays: what ranks have displayed, oldest first.
        notice: what the launcher itself said last.
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
    displays: tuple[Display, ...] = ()
    trouble: Trouble | None = None
    notice: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.status in ("done", "failed", "stopped")


def picture(run: Run, usage: Mapping[int, Usage] | None = None) -> Picture:
    """Return what a view of the run shows now; safe from any thread."""
    record, job = run.record, run.job
    status = run.status
    over = status in ("done", "failed", "stopped")
    ranks = _ranks(run)
    shown = _shown(job.output, ranks)
    bars = {rank: found for rank in ranks if (found := _bars(record, rank, rank in shown, over))}
    now = time.time()
    return Picture(
        name=job.name,
        status=status,
        seconds=run.seconds,
        started=run.started,
        background=job.background,
        distributed=job.distributed,
        stopping=run.stop_is_asked and not over,
        restarts=record.restarts,
        ranks=tuple(_rank(run, rank, status, now, (usage or {}).get(rank)) for rank in ranks),
        bars=bars,
        slowest=min(bars, key=lambda rank: _place(record, rank), default=None),
        outputs={
            rank: Output(total=record.line_counts.get(rank, 0), lines=tuple(record.tails.get(rank, ())))
            for rank in shown
        },
        metrics={name: tuple(points) for name, points in list(record.metrics.items())},
        displays=tuple(event for (rank, _), event in list(record.displays.items()) if rank in shown),
        trouble=_trouble(run),
        notice="" if run.is_over and not run.failure else record.notice,
    )


def _ranks(run: Run) -> list[int]:
    known = {rank for rank in list(run.record.phases) if rank >= 0}
    if run.job.rendezvous.num_nodes == 1:
        known |= set(range(run.job.local_world_size))
    return sorted(known)


def _shown(output: Any, ranks: Sequence[int]) -> list[int]:
    """Return the ranks whose output is to be shown."""
    if isinstance(output, str):
        return {"all": list(ranks), "first": list(ranks[:1]), "none": []}[output]
    return [rank for rank in ranks if rank in output]


def _rank(run: Run, rank: int, status: RunStatus, now: float, usage: Usage | None) -> RankState:
    record = run.record
    failure = next((found for found in list(record.failures) if found.rank == rank), None)
    pulse = record.pulses.get(rank)
    state = _status(run, rank, status, failure)
    waited = now - pulse.time if state == "running" and pulse is not None and pulse.waiting else 0.0
    waits = waited >= _WAITING_SECONDS
    return RankState(
        rank=rank,
        status="waiting" if waits else state,
        waiting=pulse.waiting if waits and pulse is not None else "",
        waited=waited if waits else 0.0,
        step=pulse.steps if pulse is not None and pulse.steps else None,
        rate=_rate(record, rank, state),
        usage=usage,
        note=_note(failure),
    )


def _status(run: Run, rank: int, status: RunStatus, failure: Failure | None) -> RankStatus:
    if failure is not None:
        return "killed" if failure.error is None and (failure.exitcode or 0) < 0 else "failed"
    if not run.job.distributed:
        return status
    if rank in run.record.results:
        return "done"
    if status in ("done", "failed", "stopped"):
        return "stopped"
    phase = run.record.phases.get(rank)
    return "running" if phase is not None and phase.name == "running" else "starting"


def _rate(record: RunRecord, rank: int, state: RankStatus) -> float | None:
    """Return steps a second: of late while it runs, over all its time afterwards."""
    pulse, phase = record.pulses.get(rank), record.phases.get(rank)
    if state in ("starting", "running") or pulse is None or phase is None:
        return record.pace(rank)
    seconds = pulse.time - phase.time
    return pulse.steps / seconds if pulse.steps and seconds > 0 else None


def _note(failure: Failure | None) -> str:
    if failure is None:
        return ""
    return failures.one_line(failure).removeprefix(f"rank {failure.rank} (process {failure.pid}) ")


# -- progress


def _bars(record: RunRecord, rank: int, shown: bool, over: bool) -> tuple[Bar, ...]:
    pulse = record.pulses.get(rank)
    found = [] if pulse is None or not pulse.batch or over else [_loader_bar(pulse)]
    drawn: dict[str, Progress] = {}  # of several with one name, one after the other, the newest
    for (of, _), bar in list(record.progress.items()):
        if of == rank and shown and (bar.leave or not bar.finished):
            drawn[bar.description] = bar
    return (*found, *map(_tqdm_bar, list(drawn.values())[-_MAX_BARS:]))


def _loader_bar(pulse: Pulse) -> Bar:
    known = bool(pulse.batches)
    return Bar(
        label=f"epoch {pulse.epoch + 1}",
        text=f"batch {pulse.batch}" + (f" of {pulse.batches}" if known else ""),
        fraction=min(1.0, pulse.batch / pulse.batches) if pulse.batches else None,
    )


def _tqdm_bar(bar: Progress) -> Bar:
    """Return tqdm's bar without the part that it draws of characters."""
    start, drawn, rest = bar.text.rpartition("|")
    text = rest if drawn else start + rest
    return Bar(
        label=bar.description,
        text=text.strip().removeprefix(f"{bar.description}: "),
        fraction=min(1.0, bar.count / bar.total) if bar.total else None,
    )


def _place(record: RunRecord, rank: int) -> tuple[float, ...]:
    """Return how far a rank with bars has come, to compare it with others."""
    pulse = record.pulses.get(rank)
    counts = record.passed.get(rank, 0.0)
    counts += sum(bar.count for (of, _), bar in list(record.progress.items()) if of == rank)
    if pulse is None:
        return (0, 0, 0, counts, rank)
    return (pulse.steps, pulse.epoch, pulse.batch, counts, rank)


# -- failures


def _trouble(run: Run) -> Trouble | None:
    error = run.failure
    if error is None:
        found = list(run.record.failures)
        return Trouble(title=failures.one_line(failures.first(found))) if found else None
    if isinstance(error, (RunStoppedError, KeyboardInterrupt)):
        return None
    title = failures.title(error)
    if not run.job.background:
        return Trouble(title=title)  # the cell has the rest
    text = traceback_of(error)
    return Trouble(title=title, traceback=text, others=tuple(note for note in run.notes if note not in text))


def traceback_of(error: BaseException) -> str:
    """Return a traceback as IPython prints it, where it runs, else as Python does."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if shell is None:
        import traceback

        return "".join(traceback.format_exception(error)).rstrip("\n")
    from copy import copy

    formatter = copy(shell.InteractiveTB)  # it keeps what it printed last, for the debugger
    own: Callable[[], list[str]] | None = getattr(error, "_render_traceback_", None)
    parts = own() if own is not None else None
    if parts is None:
        parts = formatter.structured_traceback(type(error), error, error.__traceback__, tb_offset=0)
    return "\n".join(parts)
