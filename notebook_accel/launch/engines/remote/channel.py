"""The agent's end of the way between a host and the notebook."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Final

from ....events import Buffer, Event
from ....stream.wire import FrameReader, frame_lines
from .keep_alive import KEEP_ALIVE, KEEP_ALIVE_SECONDS, NOTEBOOK_SILENCE_SECONDS, KeepAlive

_BYTES: Final = 1 << 18
_READS: Final = 64


class Channel:
    """The way to the notebook: frames of events and orders.

    Args:
        incoming: descriptor that is read.
        outgoing: descriptor that is written to.
        expects_news: whether the notebook says now and then that it lives, so that silence means its end.
    """

    def __init__(self, incoming: int, outgoing: int, *, expects_news: bool = True) -> None:
        self._in, self._out = incoming, outgoing
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)
        self._frames = FrameReader()
        self._orders: list[Event] = []
        self._is_over = False
        self._watch = KeepAlive(time.monotonic(), NOTEBOOK_SILENCE_SECONDS) if expects_news else None
        self._next_news = 0.0

    def fileno(self) -> int:
        """Return the descriptor that can be read when something has come."""
        return self._in

    def close(self) -> None:
        """Lead both descriptors, and those of output, nowhere: what is at the other end learns that this is the end."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (self._in, self._out, 1, 2):
            os.dup2(nowhere, fd, inheritable=fd < 3)
        os.close(nowhere)

    def send(self, events: Sequence[Event]) -> None:
        """Send events, and read what comes meanwhile; ConnectionError where the notebook is gone."""
        for part in frame_lines(events):
            self._write(part)
        self._next_news = time.monotonic() + KEEP_ALIVE_SECONDS

    def keep_alive(self) -> None:
        """Say that the agent lives, where it is time to do so."""
        if time.monotonic() >= self._next_news:
            self._next_news = time.monotonic() + KEEP_ALIVE_SECONDS
            self._write(KEEP_ALIVE)

    def _write(self, part: Buffer) -> None:
        rest = memoryview(part)
        while rest:
            try:
                rest = rest[os.write(self._out, rest) :]
            except BlockingIOError:
                readable = [] if self._is_over else [self._in]
                select.select(readable, [self._out], [], 1.0)
                self._read()
                if self._is_over:
                    raise ConnectionResetError("the notebook is gone") from None

    def receive(self) -> list[Event]:
        """Return what has come.

        Raises:
            FrameError: it cannot be read.
            ConnectionError: the notebook is gone, or has been silent for too long.
        """
        self._read()
        orders, self._orders = self._orders, []
        if self._is_over and not orders:
            raise ConnectionResetError("the notebook is gone")
        return orders

    def _read(self) -> None:
        heard = False
        for _ in range(_READS):  # what comes may not end soon, and others wait
            if self._is_over:
                return
            try:
                data = os.read(self._in, _BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            heard = True
            if not data:
                self._is_over = True
                return
            self._orders += self._frames.feed(data)
        if self._watch is not None and self._watch.is_lost(time.monotonic(), heard=heard):
            self._is_over = True
