"""Frames survive any splitting of the byte stream."""

from __future__ import annotations

import itertools
import pickle
import socket
import threading
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_accel.events import CallOrder, Display, Event, Line, Result
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.wire import FrameReader, frame


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
