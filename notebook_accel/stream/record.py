"""What a run has said so far: each event changes this record, and nothing else does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..events import (
    ClearOutput,
    Display,
    Event,
    Failure,
    Held,
    Line,
    Lines,
    Metric,
    Notice,
    Phase,
    Progress,
    Pulse,
    Result,
    Save,
    Stream,
    Unfinished,
)
from .bounded import Beginning, History, NewestByKey
from .lines import split_lines
from .series import MAX_POINTS, MOST_MEASURED, Metrics, Point, Series

MAX_BYTES: Final = 24_000_000
MAX_TAIL: Final = 200
_TAIL_PACK: Final = 16  # lines: a tail of many ranks has room for few
_MAX_DISPLAYS: Final = 32
_MAX_BARS: Final = 1_000  # of all ranks, of which half may be finished
_MAX_SHOWN: Final = 4_000
_LAST_WORDS: Final = 20
_PACE_PULSES: Final = 20
_RANK_BYTES: Final = 6_000  # of a rank's phase, pulses and empty tail
_MOST_SERIES: Final = 2_000  # of these ranks
# Shares of the memory. What metrics, displays, bars and ranks do not use is for lines, at least the last share.
_METRICS, _OF_RANKS, _DISPLAYS, _BARS, _TAILS, _HEADS, _LEAST = (
    1 / 3,
    1 / 12,
    1 / 4,
    1 / 12,
    1 / 12,
    1 / 24,
    1 / 8,
)


@dataclass(eq=False, repr=False)  # its fields would fill the cell with megabytes
class RunRecord:
    """State of a run by rank. Only `apply` and `apply_all` write it, but for `is_over`; other threads may read.

    It takes about `max_bytes` of memory, however much is told. Failures and results are not counted, for the run needs
    them; and the newest display is kept, whatever its size.

    Attributes:
        max_bytes: memory for lines, metrics, displays, bars and the state of ranks; older ones are forgotten.
        max_points: values that are kept of each metric; of more, every second, fourth and so on (see `Series`).
        phases: last phase of each rank.
        failures: failures of the current attempt, in order of arrival.
        failed: the ranks of these.
        results: the returned values by rank, still pickled.
        passed: how far each rank came in bars that are forgotten.
        pulses: how far each rank has come.
        saves: the checkpoint that each rank writes in the background, or wrote last.
        held: for each rank that is to stop, how often it had asked whether to.
        notice: the last message of the launcher itself, empty if there was none.
        unfinished: what each rank has written since its last line, by (rank, stream).
        line_counts: how many lines each rank has written.
        nodes: the host or node of each rank that was launched on hosts or a cluster.
        displays: the last displays, updates applied, oldest first.
        restarts: how often the workers were started again.
        is_over: whether the run has ended. Its ranks are all known then.
    """

    max_bytes: int = MAX_BYTES
    max_points: int = MAX_POINTS
    phases: dict[int, Phase] = field(default_factory=dict, init=False)
    nodes: dict[int, str] = field(default_factory=dict, init=False)
    failures: list[Failure] = field(default_factory=list, init=False)
    failed: set[int] = field(default_factory=set, init=False)
    results: dict[int, Result] = field(default_factory=dict, init=False)
    passed: dict[int, float] = field(default_factory=dict, init=False)
    pulses: dict[int, Pulse] = field(default_factory=dict, init=False)
    saves: dict[int, Save] = field(default_factory=dict, init=False)
    held: dict[int, int] = field(default_factory=dict, init=False)
    notice: str = field(default="", init=False)
    line_counts: dict[int, int] = field(default_factory=dict, init=False)
    displays: NewestByKey[tuple[int, str], Display] = field(init=False)
    restarts: int = field(default=0, init=False)
    is_over: bool = field(default=False, init=False)
    unfinished: NewestByKey[tuple[int, Stream], Unfinished] = field(init=False)
    _metrics: Metrics[str] = field(init=False)  # of the first rank of the run
    _of_ranks: Metrics[tuple[int, str]] = field(init=False)  # of the others
    _measured: set[int] = field(default_factory=set, init=False)  # these
    _bars: NewestByKey[tuple[int, int], Progress] = field(init=False)  # that are not finished
    _finished_bars: NewestByKey[tuple[int, int], Progress] = field(init=False)
    _paces: dict[int, deque[tuple[int, float]]] = field(default_factory=dict, init=False)
    _lines_before: dict[int, int] = field(default_factory=dict, init=False)  # this start of each rank
    _shown: History = field(init=False)
    _heads: dict[int, Beginning] = field(default_factory=dict, init=False)  # the first lines of each rank
    _tails: dict[int, History] = field(default_factory=dict, init=False)  # the newest ones
    _num_displays: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.displays = NewestByKey(int(self.max_bytes * _DISPLAYS), _MAX_DISPLAYS)
        bars = int(self.max_bytes * _BARS / 3)
        self._bars, self._finished_bars = (NewestByKey(bars, _MAX_BARS // 2) for _ in range(2))
        self.unfinished = NewestByKey(bars, _MAX_BARS)
        self._metrics = Metrics(int(self.max_bytes * _METRICS), self.max_points)
        self._of_ranks = Metrics(int(self.max_bytes * _OF_RANKS), self.max_points, _MOST_SERIES)
        self._shown = History(self.max_bytes)
        self._leave_room()

    @property
    def progress(self) -> dict[tuple[int, int], Progress]:
        """Last state of each of the newest bars, by (rank, bar)."""
        return {**self._finished_bars, **self._bars}

    @property
    def metrics(self) -> Mapping[str, Series]:
        """The values of each metric in the first rank that has it, oldest first; a restart continues them."""
        found = dict(self._metrics.series)
        for (_, name), series in sorted(self._of_ranks.series.items(), key=_get_rank):
            found.setdefault(name, series)
        return found

    @property
    def measured_ranks(self) -> Sequence[int]:
        """The ranks whose metrics are kept, in order: of up to `MOST_MEASURED` all that have any."""
        first = [0] if self._metrics.series else []
        return first + sorted(self._measured)

    def find_metrics(self, rank: int) -> Mapping[str, Series]:
        """Return the values of each metric of a rank, oldest first.

        Args:
            rank: which one.
        """
        if rank == 0:
            return self._metrics.series
        return {name: series for (one, name), series in list(self._of_ranks.series.items()) if one == rank}

    def apply_all(self, events: Sequence[Event]) -> None:
        """Change the record by the next events.

        Args:
            events: of any kind.
        """
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Change the record by the next event.

        Args:
            event: of any kind.
        """
        if isinstance(event, Lines):
            self._lines(event)
            return
        if isinstance(event, Result):
            self.results[event.rank] = event
            return
        if isinstance(event, Failure):
            self.failures.append(event)
            self.failed.add(event.rank)
            return
        if isinstance(event, Held):
            self.held[event.rank] = event.questions
            return
        if isinstance(event, Save):
            self.saves[event.rank] = event
            return
        if isinstance(event, Pulse):
            self._pulse(event)
            return
        if isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, Unfinished):
            self.unfinished.put((event.rank, event.stream), event)
        elif isinstance(event, Metric):
            self._metric(event)
        elif isinstance(event, (Display, ClearOutput)):
            self._display(event)
        elif isinstance(event, Notice):
            self.notice = event.text
            self._shown.add(event)
        elif isinstance(event, Phase):
            self._phase(event)
            self._shown.add(event)
        self._leave_room()

    def _leave_room(self) -> None:
        """Leave to lines the memory that the others do not use."""
        bars = self._bars.num_bytes + self._finished_bars.num_bytes + self.unfinished.num_bytes
        ranks = _RANK_BYTES * max(len(self.phases), len(self._tails), len(self.pulses))
        used = self._metrics.num_bytes + self._of_ranks.num_bytes + self.displays.num_bytes + bars + ranks
        left = self.max_bytes * (1 - _TAILS - _HEADS) - used
        self._shown.max_bytes = int(max(left, self.max_bytes * _LEAST))  # the newest display may be huge

    def _lines(self, lines: Lines) -> None:
        rank, texts = lines.rank, lines.texts
        together: Line | Lines = split_lines(lines)[0] if len(texts) == 1 else lines
        self._shown.add(together)
        tail = self._tails.get(rank)
        if tail is None:
            tail = self._begin_tail(rank)
        if len(texts) > MAX_TAIL or max(map(len, texts)) > _MAX_SHOWN:
            together = replace(lines, texts=tuple(map(_cut_text, texts[-MAX_TAIL:])))
        tail.max_bytes = int(self.max_bytes * _TAILS) // len(self._tails)
        tail.add(together)
        if not (head := self._heads[rank]).is_full:
            head.add(lines, int(self.max_bytes * _HEADS) // max(len(self._heads), len(self.phases)))
        if self.unfinished:
            self.unfinished.remove((rank, lines.stream))
        self.line_counts[rank] += len(texts)

    def _begin_tail(self, rank: int) -> History:
        tail = self._tails[rank] = History(0, MAX_TAIL, _TAIL_PACK)
        self._heads[rank] = Beginning()
        self.line_counts[rank] = 0
        self._leave_room()
        return tail

    def _pulse(self, pulse: Pulse) -> None:
        self.pulses[pulse.rank] = pulse
        pace = self._paces.setdefault(pulse.rank, deque(maxlen=_PACE_PULSES))
        pace.append((pulse.steps, pulse.time if pulse.moment is None else pulse.moment))

    def _progress(self, bar: Progress) -> None:
        key = (bar.rank, bar.bar)
        if len(bar.text) > _MAX_SHOWN:
            bar = replace(bar, text=_cut_text(bar.text))
        if not bar.finished:
            self._finished_bars.remove(key)
            self._bars.put(key, bar)
            return
        self._bars.remove(key)
        for old in self._finished_bars.put(key, bar):
            self.passed[old.rank] = self.passed.get(old.rank, 0.0) + old.count

    def _display(self, event: Display | ClearOutput) -> None:
        if isinstance(event, ClearOutput):
            for key in [key for key in self.displays if key[0] == event.rank]:
                self.displays.remove(key)
            return
        self._num_displays += 1
        key = (event.rank, str(event.transient.get("display_id") or f"number {self._num_displays}"))
        if key in self.displays or not event.update:
            self.displays.put(key, event)

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
        steps, seconds = (last - first for first, last in zip(pulses[0], pulses[-1], strict=True))
        return steps / seconds if steps > 0 and seconds > 0 else None

    def forget_values(self) -> None:
        """Drop the values of results: the run has them, and pickled they take the same memory again."""
        self.results = {rank: replace(result, value=b"", buffers=()) for rank, result in self.results.items()}

    def _metric(self, metric: Metric) -> None:
        rank = metric.rank
        if rank == 0:
            for name, value in metric.values.items():
                self._metrics.add(name, Point(metric.step, metric.time, value))
            return
        if rank not in self._measured:
            if len(self._measured) >= MOST_MEASURED:
                return
            self._measured.add(rank)
        for name, value in metric.values.items():
            self._of_ranks.add((rank, name), Point(metric.step, metric.time, value))

    def _phase(self, phase: Phase) -> None:
        if phase.name == "restarting":
            self.restarts += 1
            self.phases, self.nodes = {}, {}  # nodes may have joined or left, so not all ranks come again
            self.failures.clear()
            self.failed.clear()
            self.results.clear()
            self._bars.clear()
            self._finished_bars.clear()
            self.unfinished.clear()
            self.passed.clear()
            self.pulses.clear()
            self._paces.clear()
            self.saves.clear()
            self.held.clear()
            self.notice = ""
            return
        self.phases[phase.rank] = phase
        if phase.node:
            self.nodes[phase.rank] = phase.node
        elif phase.name != "running":  # it may come to another one
            self.nodes.pop(phase.rank, None)
        if phase.name == "starting":
            self._lines_before[phase.rank] = self.line_counts.get(phase.rank, 0)

    @property
    def is_queued(self) -> bool:
        """Whether a cluster has no room for the run yet."""
        whole = self.phases.get(-1)
        return whole is not None and whole.name == "queued"

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics as rows, oldest first: `step`, `time` and the values that came together.

        Of a long run they are an even choice (see `Series`). A row that is there for the smallest, largest or last
        value of one metric, or for its first NaN, may lack the others. Metrics that are called `step` or `time` are
        `metric_step` and `metric_time` here.
        """
        return _make_rows(self.metrics)

    def rank_rows(self, rank: int | None = None) -> list[dict[str, Any]]:
        """Return the metrics of ranks as `rows` does, with the `rank` of each row, oldest first.

        Args:
            rank: whose; None is all that are measured. See `lines`.
        """
        self._check_rank(rank)
        ranks = self.measured_ranks if rank is None else [rank]
        rows = [row for one in ranks for row in _make_rows(self.find_metrics(one), one)]
        return sorted(rows, key=lambda row: row["time"])

    @property
    def end(self) -> int:
        """The position after the last event."""
        return self._shown.end

    def since(self, position: int) -> Iterator[Event]:
        """Yield the lines, messages and phases from a position on that are still kept.

        Args:
            position: an earlier value of `end`, or 0.
        """
        return self._shown.since(position)

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the lines that are still kept.

        Args:
            rank: of this rank only; None for all. One that an ended run did not have is a ValueError.
        """
        self._check_rank(rank)
        return [*self._shown.texts(rank)]

    def _check_rank(self, rank: int | None) -> None:
        known = {*self.phases, *self.line_counts} - {-1}
        if self.is_over and known and rank is not None and rank not in known:
            ranks = f"rank {min(known)} alone" if len(known) == 1 else f"ranks {min(known)} to {max(known)}"
            raise ValueError(f"rank={rank!r}: the run had {ranks}")

    def find_tail(self, rank: int) -> list[Line]:
        """Return the newest lines of a rank: `MAX_TAIL`, or fewer where long lines or many ranks take much memory.

        Args:
            rank: whose lines.
        """
        tail = self._tails.get(rank)
        return [] if tail is None else [line for line in tail.since(0) if isinstance(line, Line)]

    def find_head(self, rank: int) -> list[Line]:
        """Return the first lines of a rank, as far as there is memory for them.

        Args:
            rank: whose lines.
        """
        head = self._heads.get(rank)
        return [] if head is None else head.find_lines()

    def find_lines(self) -> dict[int, list[Line]]:
        """Return the newest lines, all that are still kept, by rank."""
        found: dict[int, list[Line]] = {}
        for event in self._shown.since(0):
            if isinstance(event, Line):
                found.setdefault(event.rank, []).append(event)
        return found

    def find_last_words(self, rank: int) -> list[str] | None:
        """Return the last lines of errors of a rank whose function has not begun; None for any other rank.

        Args:
            rank: one that has ended.
        """
        phase = self.phases.get(rank)
        if phase is None or phase.name != "starting":
            return None
        return self.find_errors(rank)[-_LAST_WORDS:]

    def find_errors(self, rank: int) -> list[str]:
        """Return what a rank has written to stderr since it was started last, as far as its newest lines reach.

        Args:
            rank: whose lines.
        """
        tail = self.find_tail(rank)
        count = self.line_counts.get(rank, 0) - self._lines_before.get(rank, 0)
        return [line.text for line in tail[max(0, len(tail) - count) :] if line.stream == "stderr"]


def _get_rank(entry: tuple[tuple[int, str], Series]) -> int:
    return entry[0][0]


def _make_rows(metrics: Mapping[str, Series], rank: int | None = None) -> list[dict[str, Any]]:
    own = {} if rank is None else {"rank": rank}
    taken = ("step", "time", *own)
    rows: dict[tuple[float, int | None], dict[str, Any]] = {}
    for name, points in list(metrics.items()):
        name = f"metric_{name}" if name in taken else name
        for point in list(points):
            key = (point.time, point.step)
            rows.setdefault(key, {**own, "step": point.step, "time": point.time})[name] = point.value
    return [rows[key] for key in sorted(rows, key=lambda key: key[0])]


def make_table(rows: list[dict[str, Any]]) -> Any:
    """Return rows as a DataFrame of pandas if pandas is installed, else as they are.

    Args:
        rows: by column.
    """
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def _cut_text(text: str) -> str:
    """Return a text, or the beginning of one that is long."""
    return f"{text[:_MAX_SHOWN]} ..." if len(text) > _MAX_SHOWN else text
