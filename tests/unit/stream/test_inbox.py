"""The notebook's end of the workers' sockets: what waits for more, and what does not."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from notebook_accel import events
from notebook_accel.events import Event, Lines, Pulse, Unfinished
from notebook_accel.launch.transfer import failures
from notebook_accel.stream import inbox as module
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.inbox import Inbox
from notebook_accel.stream.wire import FrameReader, frame
from tests.unit.clock import PATIENCE_S, Clock

NOW = 1.0


class Rank:
    """A worker's ends of an inbox."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        ours, self._theirs = socket.socketpair()
        reader, self._writer = Pipe(duplex=False)
        self.emitter = Emitter(self._theirs, rank=0)
        self.inbox.add(0, {"events": ours, "stdout": reader})

    def write(self, text: str) -> None:
        os.write(self._writer.fileno(), text.encode())

    def pulse(self) -> None:
        self.emitter.emit(Pulse(rank=0, time=time.time()))

    def close(self) -> None:
        self.inbox.close()
        self._theirs.close()
        self._writer.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


def texts(events: list[Event]) -> list[str]:
    return [name for event in events for name in getattr(event, "texts", [type(event).__name__])]


def test_lines_that_follow_closely_come_together(rank: Rank) -> None:
    rank.write("first\n")
    assert texts(rank.inbox.poll(5)) == ["first"]
    for _ in range(200):  # a busy machine may write the second too late, or come back too late itself
        writes = threading.Timer(0.002, rank.write, ["third\n"])
        rank.write("second\n")
        writes.start()
        found = texts(rank.inbox.poll(5))
        writes.join()
        if found == ["second", "third"]:
            return
        assert found == ["second"]
        rank.write("\n")
        rank.inbox.poll(5)
    pytest.fail("no two lines came together")


def test_an_event_does_not_wait_for_lines(rank: Rank) -> None:
    rank.write("first\n")
    assert texts(rank.inbox.poll(5)) == ["first"]
    rank.write("second\n")
    rank.pulse()
    assert texts(rank.inbox.poll(5)) == ["Pulse", "second"]


def test_a_watched_descriptor_does_not_wait_for_lines(rank: Rank) -> None:
    read, write = os.pipe()
    try:
        rank.inbox.watch(read)
        os.write(write, b"x")
        rank.write("first\n")
        assert texts(rank.inbox.poll(5)) == ["first"]
        assert texts(rank.inbox.poll(3600)) == []
        rank.inbox.unwatch(read)
    finally:
        os.close(read)
        os.close(write)


def test_orders_that_do_not_fit_wait_for_the_polls() -> None:
    here, there = socket.socketpair()
    inbox = Inbox()
    inbox.add(0, {"events": here})
    big = events.CallOrder(rank=0, time=NOW, call=1, work=b"x" * 5_000_000, sends_value=True)
    last = events.LeaveOrder(rank=0, time=NOW)
    inbox.tell(big)
    inbox.tell(last)
    reader, received = FrameReader(), list[Event]()
    there.setblocking(False)
    deadline = time.monotonic() + PATIENCE_S
    while len(received) < 2 and time.monotonic() < deadline:
        inbox.poll(0.0)
        try:
            received += reader.feed(there.recv(1 << 20))
        except BlockingIOError:
            continue
    assert received == [big, last]
    inbox.tell(events.LeaveOrder(rank=5, time=NOW))  # there is no such rank
    there.close()
    inbox.tell(last)  # it has ended
    inbox.close()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (bytes(4), "a frame has 0 parts"),
        (b"\xff" * 9, "a frame has 4294967295 parts"),
        (struct.pack("!IQ", 1, 0), "EOFError"),
        (struct.pack("!IQ", 1, 5) + b"N.   ", "a NoneType is no event"),
        (b"".join(frame(events.Held(rank=1, time=NOW, questions=1))), "an event of rank 1 from rank 0"),
    ],
)
def test_a_rank_that_sends_no_frames_is_lost(more: bytes, why: str) -> None:
    here, there = socket.socketpair()
    inbox = Inbox()
    inbox.add(0, {"events": here})
    said = events.Held(rank=0, time=NOW, questions=2)
    there.sendall(b"".join([*frame(said), more]))
    held, failure = inbox.poll(5)
    assert held == said, "what came before it counts"
    assert isinstance(failure, events.Failure) and why in failure.lost
    assert "rank 0 is lost: what it sends cannot be read" in str(failures.make_exit_error(failure))
    inbox.tell_all(b"g")
    inbox.tell(events.LeaveOrder(rank=0, time=NOW))
    assert inbox.poll(0) == [] and inbox.finish(0) == []
    there.close()
    inbox.close()


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_was_written_in_a_call_comes_before_its_end(rank: Rank, has_ended: bool) -> None:
    rank.write("in the call\nand its last words")
    result = events.Result(rank=0, time=NOW, value=b"")
    end = events.CallEnd(rank=0, time=NOW, call=1, outcome=result, collectives={})
    rank.emitter.emit(end)
    *before, last = rank.inbox.finish(0) if has_ended else rank.inbox.poll(PATIENCE_S)
    assert last == end and texts(before) == ["in the call", "and its last words"]


def test_unfinished_lines_are_drained() -> None:
    here, there = socket.socketpair()
    read_end, write_end = os.pipe()
    inbox = Inbox()
    with open(read_end, "rb", buffering=0) as out:
        inbox.add(0, {"events": here, "stdout": out})  # type: ignore[dict-item]
        os.write(write_end, b"whole\npart")
        lines = inbox.drain(0)
        os.write(write_end, b"next\n")
        lines += inbox.drain(0)
        assert [text for event in lines if isinstance(event, Lines) for text in event.texts] == [
            "whole",
            "part",
            "next",
        ]
        os.close(write_end)
        there.close()
        inbox.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The inbox's."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def poll_for(rank: Rank, clock: Clock, seconds: float = 0.5) -> list[Event]:
    """Return what comes within some time."""
    found, end = list[Event](), clock.now + seconds
    while clock.now < end:
        clock.now += 0.02
        found += rank.inbox.poll(0.0)
    return found


def describe(events: list[Event]) -> list[tuple[str, str]]:
    found = []
    for event in events:
        if isinstance(event, Lines):
            found += [("Line", text) for text in event.texts]
        elif isinstance(event, Unfinished):
            found.append(("Unfinished", event.text))
    return found


def test_what_no_newline_has_ended_is_shown_once_it_stands(rank: Rank, clock: Clock) -> None:
    rank.write("one\nname? ")
    assert describe(rank.inbox.poll(5)) == [("Line", "one")], "a line that is being written is not torn"
    assert describe(poll_for(rank, clock)) == [("Unfinished", "name? ")], "once"
    rank.write("Ann\n")
    assert describe(poll_for(rank, clock, 0.3)) == [("Line", "name? Ann")]


def test_writes_without_newline_are_news_though_they_show_the_same(rank: Rank, clock: Clock) -> None:
    found = list[Event]()
    for _ in range(3):
        rank.write("working\r")
        found += poll_for(rank, clock, 0.3)
    assert describe(found) == [("Unfinished", "working")] * 3


def test_many_writes_without_newline_are_shown_a_few_times_and_to_the_last(rank: Rank, clock: Clock) -> None:
    found = list[Event]()
    for number in range(300):
        clock.now += 0.002
        rank.write(f"\r{number} of 300")
        found += rank.inbox.poll(0.0)
    found += poll_for(rank, clock)
    shown = describe(found)
    assert shown[-1] == ("Unfinished", "299 of 300") and len(shown) < 50
    rank.write("\n")
    assert describe(poll_for(rank, clock))[0] == ("Line", "299 of 300"), "nobody goes back to it"


def test_a_flood_of_lines_has_no_unfinished_ones(rank: Rank, clock: Clock) -> None:
    found, end = list[Event](), clock.now + 0.6
    while clock.now < end:
        clock.now += 0.001
        rank.write("end of a line\nand its beg")
        found += rank.inbox.poll(0.0)
    assert not [event for event in found if isinstance(event, Unfinished)]
    assert ("Line", "and its begend of a line") in describe(found)
    assert describe(rank.inbox.drain(0))[-1] == ("Line", "and its beg")
    assert describe(poll_for(rank, clock)) == []


def test_a_connection_that_was_read_to_its_end_is_not_read_again() -> None:
    inbox = Inbox()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    inbox.add(0, {"events": ours})
    Emitter(theirs, rank=0).emit(Pulse(rank=0, time=time.time()))
    theirs.close()
    found = [*inbox.poll(5), *inbox.poll(5)]
    assert [type(event) for event in [*found, *inbox.finish(0)]] == [Pulse]
    inbox.close()
