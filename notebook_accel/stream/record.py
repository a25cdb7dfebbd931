"""What a run has said so far: a pure fold of its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
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
_MAX_BARS = 1_000  # of all ranks; older ones that have finished are forgotten
_MAX_SHOWN = 4_000
_PACE_PULSES = 20


class Point(NamedTuple):
    """One value of a metric; `step` is None where none was given, `time` is in seconds since the epoch."""

    step: int | None
    time: float
    value: float


class RunRecord:
    """State of a run by rank; only `apply` writes, other threads may read.

    Lines and displays are kept up to `max_bytes` of memory, by estimate; older ones are forgotten.

    Attributes:
        phases: last phase of each rank.
        failures: failures of the current attempt, in order of arrival.
        results: the returned values by rank, still pickled.
        progress: last state of each of the newest bars, by (rank, bar).
        passed: how far each rank came in bars that are forgotten.
        pulses: how far each rank has come.
        tails: the newest lines of each rank (`MAX_TAIL`).
        line_counts: how many lines each rank has written.
        displays: the last displays, updates applied, oldest first.
        notice: what the launcher itself said last, empty where nothing.
        held: how often each rank that is to stop had asked whether to.
        metrics: the last values of each metric (`max_points`), oldest first; a restart goes on with them.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_points: int = MAX_POINTS) -> None:
        self.phases: dict[int, Phase] = {}
        self.failures: list[Failure] = []
        self.results: dict[int, Result] = {}
        self.progress: dict[tuple[int, int], Progress] = {}
        self.passed: dict[int, float] = {}
        self.pulses: dict[int, Pulse] = {}
        self.held: dict[int, int] = {}
        self.notice = ""
        self.metrics: dict[str, deque[Point]] = {}
        self.tails: dict[int, deque[Line]] = {}
        self.line_counts: dict[int, int] = {}
        self.displays: dict[tuple[int, str], Display] = {}
        self._paces: dict[int, deque[Pulse]] = {}
        self._max_points = max_points
        self.restarts = 0
        self._shown: deque[Event] = deque()
        self._count = 0
        self._bytes = 0
        self._max_bytes = max_bytes

    def apply(self, event: Event) -> None:
        """Take the next event."""
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
        """Keep an event that can be shown again, and forget the oldest where there are too many."""
        self._shown.append(event)
        self._count += 1
        self._bytes += _size(event)
        while self._bytes > self._max_bytes and len(self._shown) > 1:
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
        """Return a rank's optimizer steps in a second, over its last pulses; None while nobody can say."""
        pulses = list(self._paces.get(rank, ()))
        if len(pulses) < 2:
            return None
        steps, seconds = pulses[-1].steps - pulses[0].steps, pulses[-1].time - pulses[0].time
        return steps / seconds if steps > 0 and seconds > 0 else None

    def forget_values(self) -> None:
        """Keep of each result that it came: the run has its value, and pickled it takes the same memory again."""
        self.results = {rank: replace(result, value=b"", buffers=()) for rank, result in self.results.items()}

    def _metric(self, metric: Metric) -> None:
        for name, value in metric.values.items():
            history = self.metrics.setdefault(name, deque(maxlen=self._max_points))
            history.append(Point(metric.step, metric.time, value))

    def _phase(self, phase: Phase) -> None:
        if phase.name == "restarting":
            self.restarts += 1
            self.phases = {}  # nodes may have come or gone: not all ranks need be there again
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
        """Yield the events from a position on that are still held."""
        held, first = self._snapshot()
        return islice(held, max(0, position - first), None)

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the lines that are still held, of one rank or all."""
        return [
            event.text
            for event in self._snapshot()[0]
            if isinstance(event, Line) and (rank is None or event.rank == rank)
        ]

    def _snapshot(self) -> tuple[list[Event], int]:
        """Return the events held and the position of the first, however many another thread adds meanwhile."""
        while True:
            before = self._count
            held = list(self._shown)  # in one piece: nothing of it runs Python code
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
