"""The output of a worker that has no pipe to the notebook."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from notebook_accel.events import Chunk, Event
from notebook_accel.stream import pump
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.wire import FrameReader


class Pumped:
    """A descriptor with a pump, and a thread that receives what comes of it, as the notebook does."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.fd = os.open(os.devnull, os.O_WRONLY)
        before = set(threading.enumerate())
        self.pump = pump.Pump(Emitter(self._theirs, 0), "stdout", self.fd)
        self.received = bytearray()
        self.may_receive = threading.Event()
        self._threads = [*set(threading.enumerate()) - before, threading.Thread(target=self._receive)]
        self._threads[-1].start()

    def _receive(self) -> None:
        self.may_receive.wait()
        frames = FrameReader()
        while data := self._ours.recv(1 << 16):
            for event in frames.feed(data):
                assert isinstance(event, Chunk)
                self.received += event.data

    def close(self) -> None:
        self.may_receive.set()
        os.close(self.fd)
        self._threads[0].join()
        self._theirs.close()
        self._threads[1].join()
        self._ours.close()
        os.close(self.pump._read_end)


@pytest.fixture
def pumped() -> Iterator[Pumped]:
    with contextlib.closing(Pumped()) as pumped:
        yield pumped


def test_all_is_sent_in_order() -> None:
    with contextlib.closing(Pumped()) as pumped:
        pumped.may_receive.set()
        for number in range(20):
            os.write(pumped.fd, b"%d" % number * 10_000)
            pumped.pump.drain(3600.0)
    assert pumped.received == b"".join(b"%d" % number * 10_000 for number in range(20))


class Refilling(Emitter):
    """Sends nothing: for each byte of the pipe it writes another into it, as a child may that writes for ever."""

    def __init__(self) -> None:
        self.rank, self.sent, self.is_over = 0, bytearray(), False
        self.fd = os.open(os.devnull, os.O_WRONLY)

    def emit(self, event: Event) -> None:
        assert isinstance(event, Chunk)
        self.sent += event.data
        if not self.is_over:
            os.write(self.fd, b"x")


def test_who_writes_for_ever_does_not_hold_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump, "_CHUNK", 1)
    emitter, before = Refilling(), set(threading.enumerate())
    endless = pump.Pump(emitter, "stdout", emitter.fd)
    (thread,) = set(threading.enumerate()) - before
    os.write(emitter.fd, b"x" * 100 + b"mine")
    endless.drain(3600.0)
    assert b"mine" in emitter.sent
    emitter.is_over = True
    os.close(emitter.fd)
    thread.join()
    os.close(endless._read_end)


def test_a_notebook_that_does_not_read_holds_the_worker_for_a_while_only(pumped: Pumped) -> None:
    with subprocess.Popen(["yes"], stdout=pumped.fd) as child:
        pumped.pump.drain(0.01)
        child.kill()
