"""The events of a run that can be read again, and what they take of memory and of the garbage collector."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel.events import Event, Line, Lines, Notice, Stream
from notebook_accel.stream.bounded import History
from notebook_accel.stream.lines import split_lines
from notebook_accel.stream.record import RunRecord
from tests.unit.clock import wait_until


def write(texts: list[str], rank: int = 0, time: float = 0.0, stream: Stream = "stdout") -> Lines:
    return Lines(rank=rank, time=time, stream=stream, texts=tuple(texts))


def make(texts: Iterable[str], rank: int = 0, time: float = 0.0, stream: Stream = "stdout") -> list[Line]:
    return [Line(rank=rank, time=time, stream=stream, text=text) for text in texts]


def test_lines_that_are_made_together_are_those_of_the_class() -> None:
    made = split_lines(write(["a", "", "é"], 3, 1.5, "stderr"))
    assert made == make(["a", "", "é"], 3, 1.5, "stderr")
    assert [hash(line) for line in made] == [hash(line) for line in make(["a", "", "é"], 3, 1.5, "stderr")]
    with pytest.raises(AttributeError):
        made[0].text = "b"  # type: ignore[misc]


EVENTS = st.lists(
    st.one_of(
        st.builds(
            Lines,
            rank=st.integers(0, 1),
            time=st.sampled_from([0.0, 1.0]),
            stream=st.sampled_from(["stdout", "stderr"]),
            texts=st.lists(st.text(max_size=3), min_size=1, max_size=5).map(tuple),
        ),
        st.builds(Notice, rank=st.just(-1), time=st.just(0.0), text=st.text(max_size=3)),
    ),
    max_size=30,
)


@given(events=EVENTS, position=st.integers(0, 60))
def test_lines_that_come_together_are_read_as_if_each_had_come_alone(
    events: list[Event], position: int
) -> None:
    single: list[Event] = []
    for event in events:
        single += split_lines(event) if isinstance(event, Lines) else [event]
    alone, together = RunRecord(), RunRecord()
    for event in single:
        if isinstance(event, Line):
            event = write([event.text], event.rank, event.time, event.stream)
        alone.apply(event)
    together.apply_all(events)
    assert list(together.since(position)) == list(alone.since(position)) == single[position:]
    assert together.end == len(single)
    for rank in (None, 0, 1):
        assert together.lines(rank) == alone.lines(rank)
    assert together.line_counts == alone.line_counts
    for rank in (0, 1):
        assert together.find_tail(rank) == alone.find_tail(rank)


@given(sizes=st.lists(st.integers(1, 700), max_size=8))
def test_no_more_are_read_than_the_newest_ones(sizes: list[int]) -> None:
    """Nor are many more kept."""
    history, texts = History(1 << 30, 200), list[str]()
    for size in sizes:
        new = [str(len(texts) + number) for number in range(size)]
        texts += new
        history.add(write(new))
        assert [event.text for event in history.since(0) if isinstance(event, Line)] == texts[-200:]
        assert len(list(history.texts(None))) < 200 + 256
        assert history.end == len(texts)


def test_the_oldest_are_forgotten_and_the_newest_line_never() -> None:
    history = History(20_000)
    for number in range(20):
        history.add(write([f"{number}.{line}" for line in range(100)], time=float(number)))
    kept = list(history.since(0))
    assert 0 < len(kept) < 2_000 and history.end == 2_000
    assert (
        kept
        == [
            line
            for number in range(20)
            for line in make([f"{number}.{line}" for line in range(100)], time=float(number))
        ][-len(kept) :]
    )
    assert [event.text for event in history.since(1_998) if isinstance(event, Line)] == ["19.98", "19.99"]
    history.add(write(["x" * 30_000, "y" * 30_000]))
    assert list(history.texts(None)) == ["y" * 30_000]
    assert list(history.since(0)) == list(history.since(history.end - 1)) and not list(
        history.since(history.end)
    )


def test_what_many_lines_take() -> None:
    """Tried before and after: the collector has a few objects more to look at, not one for each line."""
    history = History(10_000_000)
    gc.collect()
    before = len(gc.get_objects())
    tracemalloc.start()
    try:
        for number in range(100):
            history.add(write([f"{number} {line:090}" for line in range(1_000)], time=float(number)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    gc.collect()
    assert 0.8 * history.max_bytes < held < 1.1 * history.max_bytes
    assert len(gc.get_objects()) - before < 2_000
    assert len(list(history.since(0))) > 50_000


def test_the_end_is_not_behind_events_that_are_still_being_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads on from there later would miss them."""
    seen: list[int] = []
    monkeypatch.setattr(History, "_forget", lambda history: seen.append(history.end))
    history = History(1_000)
    history.add(write(["a", "b"]))
    history.add(make(["c"])[0])
    assert seen == [0, 2] and history.end == 3


class Kept(deque[Any]):
    """What a history keeps, where a reader and a writer wait for each other between two steps."""

    def __init__(self, kept: Iterable[Any]) -> None:
        super().__init__(kept)
        self.begins, self.has_read, self.is_over = threading.Event(), threading.Event(), threading.Event()

    def extend(self, new: Iterable[Any]) -> None:
        self.begins.set()
        self.has_read.wait(60)
        super().extend(new)

    def __iter__(self) -> Iterator[Any]:
        found = list(super().__iter__())
        if not self.has_read.is_set():
            self.has_read.set()
            self.is_over.wait(60)
        return iter(found)


def test_who_reads_while_another_thread_adds_sees_none_of_it_or_all() -> None:
    history = History(10_000)
    history.add(write(["old 0", "old 1"]))
    history._kept = kept = Kept(history._kept)

    def add() -> None:
        history.add(write(["new 0", "new 1"], time=1.0))
        kept.is_over.set()

    writer = threading.Thread(target=add)
    writer.start()
    kept.begins.wait(60)
    read = [event.text for event in history.since(2) if isinstance(event, Line)]
    writer.join()
    assert read == ["new 0", "new 1"]


def test_an_interrupt_while_events_are_added_lets_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(10_000)
    history.add(write(["a", "b"]))
    with monkeypatch.context() as patch:
        patch.setattr(History, "_forget", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            history.add(write(["c", "d"]))
    history._end += 1  # as where a fork has ended the thread that was adding
    assert list(history.texts(None)) == ["a", "b", "c", "d"]
    assert [event.text for event in history.since(2) if isinstance(event, Line)] == ["c", "d"]


def test_readers_keep_up_with_a_thread_that_writes_and_forgets() -> None:
    history = History(200_000)
    stop, found = threading.Event(), 0

    def add() -> None:
        number = 0
        while not stop.is_set():
            history.add(write([str(number + line) for line in range(100)], time=float(number)))
            number += 100

    writer = threading.Thread(target=add)
    writer.start()
    try:
        wait_until(lambda: history.end)
        for _ in range(100):
            start = max(0, history.end - 150)
            numbers = [int(event.text) for event in history.since(start) if isinstance(event, Line)]
            found += len(numbers)
            first = numbers[0] if numbers else 0  # more than the start where that is forgotten already
            assert numbers == list(range(max(start, first), max(start, first) + len(numbers)))
    finally:
        stop.set()
        writer.join()
    assert found


def test_a_tail_with_room_for_few_forgets_few_at_once() -> None:
    tail = History(10_000, 200, 16)
    for start in (0, 70, 73, 76):
        count = 70 if start == 0 else 3
        tail.add(write([f"{number:0100}" for number in range(start, start + count)]))
        kept = [event.text for event in tail.since(0) if isinstance(event, Line)]
        assert kept == [f"{number:0100}" for number in range(start + count - len(kept), start + count)]
        assert len(kept) > 35
