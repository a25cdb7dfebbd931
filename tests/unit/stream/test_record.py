"""What a run has said so far, and the memory that it takes."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable, Iterator

import psutil
import pytest

from notebook_accel.events import (
    Display,
    Event,
    Line,
    Lines,
    Metric,
    Notice,
    Phase,
    Progress,
    Pulse,
    Unfinished,
)
from notebook_accel.stream import record as records
from notebook_accel.stream.bounded import History
from notebook_accel.stream.record import MAX_BYTES, RunRecord
from notebook_accel.stream.series import MOST_MEASURED


def write(number: int, text: str, rank: int = 0) -> Lines:
    return Lines(rank=rank, time=float(number), stream="stdout", texts=(text,))


def draw(number: int, text: str, **options: bool) -> Progress:
    return Progress(
        rank=number % 8,
        time=float(number),
        bar=number,
        description=f"bar {number}",
        count=1.0,
        total=2.0,
        text=text,
        **options,
    )


def show(number: int, data: object, display_id: str | None = None) -> Display:
    transient = {} if display_id is None else {"display_id": display_id}
    return Display(rank=0, time=float(number), data={"image/png": data}, transient=transient)


def measure(number: int, **values: float) -> Metric:
    return Metric(rank=0, time=float(number), values=values, step=number)


def test_a_record_that_a_cell_shows_does_not_fill_it() -> None:
    record = RunRecord()
    for number in range(1000):
        record.apply(write(number, "a line of output"))
    assert len(record.lines()) == 1000
    assert len(repr(record)) < 200


def test_lines_and_messages_are_read_from_a_position() -> None:
    record = RunRecord(max_bytes=20_000)
    for number in range(60):
        record.apply(write(number, str(number), rank=number % 2))
    kept = len(record.lines())
    assert 0 < kept < 60 and record.end == 60
    assert record.lines() == [str(number) for number in range(60 - kept, 60)]
    assert record.lines(rank=1) == [text for text in record.lines() if int(text) % 2]
    assert [event.text for event in record.since(58) if isinstance(event, Line)] == ["58", "59"]
    assert len(list(record.since(0))) == kept
    for other in (measure(60, loss=1.0), draw(60, "a bar"), show(60, "a figure")):
        record.apply(other)
    assert record.end == 60 and len(record.lines()) <= kept
    record.apply(Notice(rank=-1, time=0.0, text="a message"))
    assert [type(event) for event in record.since(60)] == [Notice]


def test_metrics_as_rows() -> None:
    record = RunRecord()
    record.apply(Metric(rank=0, time=1.0, values={"loss": 2.0, "accuracy": 0.5}, step=10))
    record.apply(Metric(rank=0, time=2.0, values={"loss": 1.0}, step=20))
    assert record.rows() == [
        {"step": 10, "time": 1.0, "loss": 2.0, "accuracy": 0.5},
        {"step": 20, "time": 2.0, "loss": 1.0},
    ]


def test_a_metric_does_not_take_the_place_of_the_rows_own_step_and_time() -> None:
    record = RunRecord()
    record.apply(Metric(rank=0, time=1.0, values={"loss": 2.0, "step": 7.0, "time": 100.0}, step=10))
    assert record.rows() == [{"step": 10, "time": 1.0, "loss": 2.0, "metric_step": 7.0, "metric_time": 100.0}]


def test_rows_of_a_long_run_keep_values_that_came_together() -> None:
    record = RunRecord(max_points=100)
    for step in range(10_001):
        record.apply(measure(step, loss=-float(step), accuracy=float(step % 7)))
    rows = record.rows()
    assert len(rows) <= 103 + 2 and rows[0]["step"] == 0 and rows[-1]["step"] == 10_000
    assert [row["step"] for row in rows if len(row) < 4] == [6], "the first largest accuracy"
    steps = [row["step"] for row in rows if row["step"] not in (6, 10_000)]
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {128}


# -- metrics of other ranks


def tell(rank: int, step: int, **values: float) -> Metric:
    return Metric(rank=rank, time=10.0 * step + rank, values=values, step=step)


def test_each_rank_has_its_own_values_and_a_metric_is_that_of_the_first_rank_that_has_it() -> None:
    record = RunRecord()
    for step in range(2):
        for rank in (3, 1, 0):
            record.apply(tell(rank, step, loss=float(rank)))
    record.apply(tell(3, 5, own=7.0))
    record.apply(tell(1, 5, own=6.0))
    assert record.measured_ranks == [0, 1, 3]
    assert {name: [point.value for point in points] for name, points in record.metrics.items()} == {
        "loss": [0.0, 0.0],
        "own": [6.0],
    }
    assert [point.value for point in record.find_metrics(3)["loss"]] == [3.0, 3.0]
    assert record.find_metrics(2) == {}
    assert [row["loss"] for row in record.rows() if "loss" in row] == [0.0, 0.0], "one row for each call"


def test_where_the_first_rank_logs_elsewhere_the_next_one_counts() -> None:
    """As in the notebook of a second node, which has ranks 8 to 15."""
    record = RunRecord()
    for rank in (9, 8):
        record.apply(tell(rank, 1, loss=float(rank)))
    assert [point.value for point in record.metrics["loss"]] == [8.0] and record.measured_ranks == [8, 9]


def test_rows_of_ranks() -> None:
    record = RunRecord()
    for rank in (0, 1):
        record.apply(tell(rank, 4, loss=0.5 + rank, time=7.0))
    first = {"rank": 0, "step": 4, "time": 40.0, "loss": 0.5, "metric_time": 7.0}
    second = {"rank": 1, "step": 4, "time": 41.0, "loss": 1.5, "metric_time": 7.0}
    assert record.rank_rows() == [first, second]
    assert record.rank_rows(1) == [second] and record.rank_rows(5) == record.lines(5) == []
    for rank in (0, 1):
        record.apply(Phase(rank=rank, time=0.0, name="starting"))
    record.is_over = True
    assert record.rank_rows(1) == [second] and record.lines(1) == []
    for read in (record.rank_rows, record.lines):
        with pytest.raises(ValueError, match="rank=5: the run had ranks 0 to 1"):
            read(5)


def test_the_first_rank_keeps_its_values_however_many_others_there_are() -> None:
    record = RunRecord(max_bytes=_BOUND)
    for event in metrics_of_ranks():
        record.apply(event)
    for step in range(200):
        record.apply(tell(0, step, loss=float(step)))
    assert len(record.metrics["loss"]) == 200
    assert len(record.measured_ranks) == 1 + MOST_MEASURED, "and of the others some"
    assert min(len(record.find_metrics(rank)["loss"]) for rank in record.measured_ranks) >= 5


# -- memory

_BOUND = 6_000_000


def lines() -> Iterator[Event]:
    for number in range(40_000):
        yield write(number, f"step {number}: loss {number / 3} " + "." * 50, rank=number % 8)


def lines_of_wide_characters() -> Iterator[Event]:
    for number in range(8_000):
        yield write(number, f"step {number}: " + "\U0001f600" * 300, rank=number % 8)


def lines_of_many_ranks() -> Iterator[Event]:
    for number in range(30):
        for rank in range(256):
            if number == 0:
                yield Phase(rank=rank, time=0.0, name="running", pid=1000 + rank)
            yield Pulse(rank=rank, time=float(number), steps=1000 + number, waiting=f"all_reduce{number}")
            yield write(number, f"rank {rank} {number} " + "é" * 400, rank=rank)


def huge_lines() -> Iterator[Event]:
    for number in range(200):
        yield write(number, str(number) * 30_000, rank=number % 8)


def pictures() -> Iterator[Event]:
    for number in range(1000):
        yield show(number, b"%d" % number + bytes(100_000))


def pictures_by_id() -> Iterator[Event]:
    for number in range(1000):
        yield show(number, f"{number}" + "x" * 100_000, display_id=f"{number % 40}" + "long" * 1000)


def nested_displays() -> Iterator[Event]:
    for number in range(10):
        yield show(number, {"layout": [{"x": [float(place) for place in range(10_000)]}]})


def metrics() -> Iterator[Event]:
    for number in range(2_000):
        yield measure(number, **{f"metric {place}": number / 3 + place for place in range(40)})


def metrics_of_ranks() -> Iterator[Event]:
    for step in range(100):
        for rank in range(1, 1_000):
            yield tell(rank, step, **dict.fromkeys(("loss", "rate", "norm", "speed"), step / 3 + rank))


def new_names_of_ranks() -> Iterator[Event]:
    for step in range(200):
        for rank in range(1, 64):
            yield tell(rank, step, loss=step / 3, **{f"accuracy of step {step}": step / 7})


def new_names() -> Iterator[Event]:
    for number in range(10_000):
        yield measure(number, loss=number / 3, **{f"accuracy of step {number}": number / 7})


def long_names() -> Iterator[Event]:
    for number in range(300):
        yield measure(number, **{f"{number}" + "n" * 20_000: 1.0})


def bars() -> Iterator[Event]:
    for number in range(8_000):
        yield draw(number, f"{number}" + "#" * 3_000, finished=number % 3 == 0)


def bars_that_never_end() -> Iterator[Event]:
    for number in range(3_000):
        yield draw(number, f"{number}" + "#" * 100_000)


def unfinished_lines() -> Iterator[Event]:
    for number in range(2_000):
        yield Unfinished(
            rank=number % 256, time=float(number), stream="stdout", text=f"{number}" + "\U0001f600" * 3_000
        )


@pytest.mark.parametrize(
    ("tell", "least"),
    [
        (lines, 0.6),
        (lines_of_wide_characters, 0.6),
        (lines_of_many_ranks, 0.5),
        (huge_lines, 0.6),
        (pictures, 0.2),
        (pictures_by_id, 0.2),
        (nested_displays, 0.1),
        (metrics, 0.1),
        (metrics_of_ranks, 0.02),
        (new_names_of_ranks, 0.03),
        (new_names, 0.1),
        (long_names, 0.2),
        (bars, 0.04),
        (bars_that_never_end, 0.02),
        (unfinished_lines, 0.01),
    ],
)
def test_a_record_takes_no_more_memory_than_its_bound(
    tell: Callable[[], Iterator[Event]], least: float
) -> None:
    """And not much less than each kind may have: else it would forget what it could keep."""
    gc.collect()
    tracemalloc.start()
    try:
        record = RunRecord(max_bytes=_BOUND)
        for event in tell():
            record.apply(event)
        del event
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert least * _BOUND <= held <= _BOUND, f"{held / _BOUND:.2f} of the bound"


def test_all_kinds_together_keep_to_the_bound() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        record = RunRecord(max_bytes=_BOUND)
        for tell in (
            lines_of_wide_characters,
            pictures,
            bars,
            metrics_of_ranks,
            new_names,
            huge_lines,
            nested_displays,
        ):
            for event in tell():
                record.apply(event)
        del event
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * _BOUND <= held <= _BOUND, f"{held / _BOUND:.2f} of the bound"
    assert record.metrics["loss"][-1].step == 9_999


def test_a_million_lines_take_the_memory_of_the_bound() -> None:
    gc.collect()
    process = psutil.Process()
    before = process.memory_info().rss
    record = RunRecord()
    for number in range(1_000_000):
        record.apply(write(number, "a line of output, and some more words", rank=number % 8))
    assert process.memory_info().rss - before < 1.5 * MAX_BYTES
    assert sum(record.line_counts.values()) == 1_000_000


def test_the_newest_is_kept_whatever_its_size() -> None:
    record = RunRecord(max_bytes=1_000_000)
    for number in range(10):
        record.apply(write(number, "small"))
    record.apply(show(0, "small"))
    record.apply(show(1, "x" * 5_000_000))
    assert record.lines() == ["small"] * 10
    record.apply(write(0, "y" * 2_000_000))
    assert [len(event.data["image/png"]) for event in record.displays.values()] == [5_000_000]
    assert [len(text) for text in record.lines()] == [2_000_000]
    assert [len(line.text) for line in record.find_tail(0)] == [5] * 10 + [4_004]


def test_a_bar_goes_on_after_it_was_forgotten() -> None:
    record = RunRecord()
    for number in range(1_500):
        record.apply(draw(number, "begins"))
    record.apply(draw(3, "goes on"))
    assert record.progress[3, 3].text == "goes on" and len(record.progress) == 500
    record.apply(draw(3, "ends", finished=True))
    assert record.progress[3, 3].text == "ends" and len(record.progress) == 500
    record.apply(Phase(rank=-1, time=0.0, name="restarting"))
    assert not record.progress


def test_the_machine_of_a_rank_is_known_until_it_starts_again() -> None:
    record = RunRecord()
    for rank in range(2):
        record.apply(Phase(rank=rank, time=0.0, name="starting", node=f"gpu{rank}"))
        record.apply(Phase(rank=rank, time=1.0, name="running"))
    assert record.nodes == {0: "gpu0", 1: "gpu1"}
    record.apply(Phase(rank=-1, time=2.0, name="restarting"))
    record.apply(Phase(rank=0, time=3.0, name="starting", node="gpu2"))
    assert record.nodes == {0: "gpu2"}
    record.apply(Phase(rank=0, time=4.0, name="queued"))
    assert not record.nodes, "it may come to another one"


def test_errors_are_those_of_the_last_start() -> None:
    record = RunRecord()
    for number, text in enumerate(("before", "after")):
        record.apply(Phase(rank=0, time=float(number), name="starting"))
        for stream in ("stderr", "stdout"):
            record.apply(Lines(rank=0, time=float(number), stream=stream, texts=(f"{text} on {stream}",)))
    assert record.find_errors(0) == ["after on stderr"] and record.find_errors(1) == []


def test_the_first_line_of_a_rank_costs_nothing_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = []

    class Counted(History):
        def __setattr__(self, name: str, value: object) -> None:
            changed.extend([name] * (name == "max_bytes"))
            super().__setattr__(name, value)

    monkeypatch.setattr(records, "History", Counted)
    record = RunRecord()
    for rank in range(1000):
        record.apply(write(1, "x", rank))
    assert len(changed) < 1000 * 5
