"""Frames survive any splitting of the byte stream."""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.events import CallOrder, Display, Event, Line, Result
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.wire import BETWEEN, FrameError, FrameReader, frame, frame_lines


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=200)
@given(st.lists(st.text(max_size=30), max_size=6), st.lists(st.integers(min_value=0), max_size=8))
def test_events_of_any_split(texts: list[str], places: list[int]) -> None:
    events: list[Event] = [Line(rank=0, time=1.0, stream="stdout", text=text) for text in texts]
    data = b"".join(bytes(part) for event in events for part in frame(event))
    reader = FrameReader()
    assert [event for chunk in _cut(data, places) for event in reader.feed(chunk)] == events


def test_buffers_travel_beside_the_pickle_and_arrive_writable() -> None:
    array = np.arange(100_000)
    ours, theirs = socket.socketpair()
    emitter = Emitter(theirs, rank=3)
    result = Result(rank=3, time=0.0, value=b"head", buffers=[pickle.PickleBuffer(array)])
    sender = threading.Thread(target=emitter.emit, args=(result,))
    sender.start()
    reader, got = FrameReader(), []
    while not got:
        got = reader.feed(ours.recv(10_000))
    sender.join()
    ours.close()
    theirs.close()
    (received,) = got
    assert isinstance(received, Result) and received.value == b"head"
    again: Any = np.frombuffer(received.buffers[0], dtype=array.dtype)
    again[0] = 5
    assert again[1:].tolist() == array[1:].tolist()


def test_what_is_between_frames_means_nothing() -> None:
    """Between all of them, or once after several; small parts are sent as one, large ones are not copied."""
    large = np.zeros(100_000, dtype=np.uint8)
    events: list[Event] = [
        Line(rank=0, time=1.0, text="a\n", stream="stdout"),
        Result(rank=0, time=1.0, value=b"", buffers=[pickle.PickleBuffer(large)]),
        Line(rank=1, time=1.0, text="b", stream="stdout"),
    ]
    parts = [*frame_lines(events)]
    assert [len(bytes(part)) for part in parts][1] == large.nbytes and len(parts) == 3
    data = BETWEEN + b"".join(parts) + BETWEEN + b"".join(frame(events[0]))
    reader = FrameReader()
    found = [event for at in range(0, len(data), 7) for event in reader.feed(data[at : at + 7])]
    assert [type(event).__name__ for event in found] == ["Line", "Result", "Line", "Line"]


def test_threads_do_not_tear_frames() -> None:
    ours, theirs = socket.socketpair()
    emitter = Emitter(theirs, rank=0)
    display = Display(rank=0, time=0.0, data={"text/plain": "x" * 5_000})
    threads = [threading.Thread(target=lambda: [emitter.emit(display) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    reader, count = FrameReader(), 0
    while count < 200:
        count += len(reader.feed(ours.recv(4_000)))
    for thread in threads:
        thread.join()
    ours.close()
    theirs.close()
    assert count == 200


def test_a_call_travels_as_a_frame() -> None:
    order = CallOrder(
        rank=1,
        time=1.0,
        call=2,
        work=b"f",
        buffers=[bytearray(b"abc")],
        sends_value=False,
        sources={"c": ["x"]},
    )
    (back,) = FrameReader().feed(b"".join(bytes(part) for part in frame(order)))
    assert back == order


def test_what_is_no_frame_is_refused() -> None:
    for data in (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1" + bytes(7) + b"\1" + b"N"):
        with pytest.raises(FrameError):
            FrameReader().feed(data)
    not_an_event = pickle.dumps(5)
    with pytest.raises(FrameError, match="a frame is no event"):
        FrameReader().feed(b"\0\0\0\1" + len(not_an_event).to_bytes(8, "big") + not_an_event)


@settings(max_examples=300)
@given(
    st.lists(st.binary(max_size=30), max_size=5),
    st.integers(0, 3),
    st.lists(st.integers(0, 1 << 60), max_size=3),
)
def test_headers_take_no_memory(chunks: list[bytes], count: int, lengths: list[int]) -> None:
    """A frame that claims to be long waits for its bytes."""
    header = count.to_bytes(4, "big") + b"".join(length.to_bytes(8, "big") for length in lengths)
    tracemalloc.start()
    reader = FrameReader()
    try:
        for chunk in (header, *chunks):
            reader.feed(chunk)
    except FrameError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "array",
    [np.empty((0, 10), np.float32), np.empty((3, 0), order="F"), np.ones((2, 3), order="F"), np.ones(())],
)
def test_arrays_of_any_shape_travel(array: np.ndarray[Any, Any]) -> None:
    result = Result(rank=0, time=0.0, value=b"", buffers=[pickle.PickleBuffer(array)])
    (received,) = FrameReader().feed(b"".join(frame(result)))
    assert isinstance(received, Result)
    assert bytes(received.buffers[0]) == array.tobytes("A")
