"""What a run has said so far: each event changes this record, and nothing else does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from ..events import (
    ClearOutput,
    Display,
    Event,
    Failure,
    Held,
    Line,
    Metric,
    Notice,
    Phase,
    Progress,
    Pulse,
    Result,
)

MAX_BYTES = 24_000_000
MAX_POINTS = 10_000
MAX_TAIL = 200
_MAX_DISPLAYS = 32
_MAX_BARS = 1_000  # of all ranks; finished ones beyond that are forgotten, the oldest first
_MAX_SHOWN = 4_000
_PACE_PULSES = 20


class Point(NamedTuple):
    """One value of a metric.

    Attributes:
        step: None if none was given.
        time: in seconds since the epoch.
        value: the value.
    """

    step: int | None
    time: float
    value: float


@dataclass(eq=False, repr=False)  # its fields would fill the cell with megabytes
class RunRecord:
    """State of a run by rank. Only `apply` writes it; other threads may read.

    Attributes:
        max_bytes: memory for lines and displays, by estimate; older ones are forgotten.
        max_points: values that are kept of each metric.
        phases: last phase of each rank.
        failures: failures of the current attempt, in order of arrival.
        results: the returned values by rank, still pickled.
        progress: last state of each of the newest bars, by (rank, bar).
        passed: how far each rank came in bars that are forgotten.
        pulses: how far each rank has come.
        held: for each rank that is to stop, how often it had asked whether to.
        notice: the last message of the launcher itself, empty if there was none.
        metrics: the last values of each metric, oldest first; a restart continues them.
        tails: the newest lines of each rank (`MAX_TAIL`).
        line_counts: how many lines each rank has written.
        displays: the last displays, updates applied, oldest first.
        restarts: how often the workers were started again.
    """

    max_bytes: int = MAX_BYTES
    max_points: int = MAX_POINTS
    phases: dict[int, Phase] = field(default_factory=dict, init=False)
    failures: list[Failure] = field(default_factory=list, init=False)
    results: dict[int, Result] = field(default_factory=dict, init=False)
    progress: dict[tuple[int, int], Progress] = field(default_factory=dict, init=False)
    passed: dict[int, float] = field(default_factory=dict, init=False)
    pulses: dict[int, Pulse] = field(default_factory=dict, init=False)
    held: dict[int, int] = field(default_factory=dict, init=False)
    notice: str = field(default="", init=False)
    metrics: dict[str, deque[Point]] = field(default_factory=dict, init=False)
    tails: dict[int, deque[Line]] = field(default_factory=dict, init=False)
    line_counts: dict[int, int] = field(default_factory=dict, init=False)
    displays: dict[tuple[int, str], Display] = field(default_factory=dict, init=False)
    restarts: int = field(default=0, init=False)
    _paces: dict[int, deque[Pulse]] = field(default_factory=dict, init=False)
    _shown: deque[Event] = field(default_factory=deque, init=False)
    _count: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)

    def apply(self, event: Event) -> None:
        """Change the record by the next event.

        Args:
            event: of any kind.
        """
        if isinstance(event, Line):  # first: there are most of them
            self._line(event)
            self._keep(event)
            return
        if isinstance(event, Result):
            self.results[event.rank] = event
            return
        if isinstance(event, Failure):
            self.failures.append(event)
            return
        if isinstance(event, Held):
            self.held[event.rank] = event.questions
            return
        if isinstance(event, Pulse):
            self.pulses[event.rank] = event
            self._paces.setdefault(event.rank, deque(maxlen=_PACE_PULSES)).append(event)
            return
        if isinstance(event, Notice):
            self.notice = event.text
        elif isinstance(event, Phase):
            self._phase(event)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, Metric):
            self._metric(event)
        elif isinstance(event, (Display, ClearOutput)):
            self._display(event)
        self._keep(event)

    def _progress(self, bar: Progress) -> None:
        self.progress[bar.rank, bar.bar] = bar
        if bar.finished and len(self.progress) > _MAX_BARS:
            oldest = next(key for key, known in self.progress.items() if known.finished)
            self.passed[oldest[0]] = self.passed.get(oldest[0], 0.0) + self.progress.pop(oldest).count

    def _keep(self, event: Event) -> None:
        """Keep an event that can be shown again, and forget the oldest if there are too many."""
        self._shown.append(event)
        self._count += 1
        self._bytes += _size(event)
        while self._bytes > self.max_bytes and len(self._shown) > 1:
            self._bytes -= _size(self._shown.popleft())

    def _line(self, line: Line) -> None:
        tail = self.tails.get(line.rank)
        if tail is None:
            tail = self.tails[line.rank] = deque(maxlen=MAX_TAIL)
            self.line_counts[line.rank] = 0
        tail.append(
            line if len(line.text) <= _MAX_SHOWN else replace(line, text=f"{line.text[:_MAX_SHOWN]} ...")
        )
        self.line_counts[line.rank] += 1

    def _display(self, event: Display | ClearOutput) -> None:
        if isinstance(event, ClearOutput):
            for key in [key for key in self.displays if key[0] == event.rank]:
                del self.displays[key]
            return
        key = (event.rank, str(event.transient.get("display_id") or f"number {self._count}"))
        if key in self.displays or not event.update:
            self.displays[key] = event
        if len(self.displays) > _MAX_DISPLAYS:
            del self.displays[next(iter(self.displays))]

    def pace(self, rank: int) -> float | None:
        """Return a rank's optimizer steps in a second, over its last pulses.

        Args:
            rank: the rank.

        Returns:
            None if there are too few pulses.
        """
        pulses = list(self._paces.get(rank, ()))
        if len(pulses) < 2:
            return None
        steps, seconds = pulses[-1].steps - pulses[0].steps, pulses[-1].time - pulses[0].time
        return steps / seconds if steps > 0 and seconds > 0 else None

    def forget_values(self) -> None:
        """Drop the values of results: the run has them, and pickled they take the same memory again."""
        self.results = {rank: replace(result, value=b"", buffers=()) for rank, result in self.results.items()}

    def _metric(self, metric: Metric) -> None:
        for name, value in metric.values.items():
            history = self.metrics.setdefault(name, deque(maxlen=self.max_points))
            history.append(Point(metric.step, metric.time, value))

    def _phase(self, phase: Phase) -> None:
        if phase.name == "restarting":
            self.restarts += 1
            self.phases = {}  # nodes may have joined or left, so not all ranks come again
            self.failures.clear()
            self.results.clear()
            self.progress.clear()
            self.passed.clear()
            self.pulses.clear()
            self._paces.clear()
            self.held.clear()
            self.notice = ""
            return
        self.phases[phase.rank] = phase

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics as rows, oldest first: `step`, `time` and the values that came together."""
        rows: dict[tuple[float, int | None], dict[str, Any]] = {}
        for name, points in list(self.metrics.items()):
            for point in list(points):
                key = (point.time, point.step)
                rows.setdefault(key, {"step": point.step, "time": point.time})[name] = point.value
        return [rows[key] for key in sorted(rows, key=lambda key: key[0])]

    @property
    def end(self) -> int:
        """The position after the last event."""
        return self._count

    def since(self, position: int) -> Iterator[Event]:
        """Yield the events from a position on that are still kept.

        Args:
            position: an earlier value of `end`, or 0.
        """
        held, first = self._snapshot()
        return islice(held, max(0, position - first), None)

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the lines that are still kept.

        Args:
            rank: of this rank only; None for all.
        """
        return [
            event.text
            for event in self._snapshot()[0]
            if isinstance(event, Line) and (rank is None or event.rank == rank)
        ]

    def _snapshot(self) -> tuple[list[Event], int]:
        """Return the events and the position of the first, even if another thread adds events meanwhile."""
        while True:
            before = self._count
            held = list(self._shown)  # in one step: it runs no Python code
            if self._count == before:
                return held, before - len(held)


_EVENT_BYTES = 240  # of a line's objects, measured


def _size(event: Event) -> int:
    """Return about how much memory an event takes."""
    if isinstance(event, Line):
        return _EVENT_BYTES + len(event.text)
    if isinstance(event, Display):
        return _EVENT_BYTES + sum(
            len(part) if isinstance(part, str) else _EVENT_BYTES for part in event.data.values()
        )
    if isinstance(event, Progress):
        return _EVENT_BYTES + len(event.text)
    return _EVENT_BYTES
