"""The agent's end of the way between a host and the notebook."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Final

from ....events import Event
from ....stream.wire import FrameReader, frame
from . import packets

_BYTES: Final = 1 << 18
_PACKET: Final = 1 << 20
_READS: Final = 64


class Channel:
    """The way to the notebook: frames of events and orders, in packets.

    Args:
        incoming: descriptor that is read.
        outgoing: descriptor that is written to.
        has_beats: whether the notebook says now and then that it lives, so that silence means its end.
    """

    def __init__(self, incoming: int, outgoing: int, *, has_beats: bool = True) -> None:
        self._in, self._out = incoming, outgoing
        for fd in (incoming, outgoing):
            os.set_blocking(fd, False)
        self._packets = packets.PacketReader()
        self._frames = FrameReader()
        self._orders: list[Event] = []
        self._is_over = False
        self._quiet = packets.Quiet(time.monotonic()) if has_beats else None
        self._next_beat = 0.0

    def fileno(self) -> int:
        """Return the descriptor that can be read when something has come."""
        return self._in

    def send(self, events: Sequence[Event]) -> None:
        """Send events, and read what comes meanwhile; ConnectionError where the notebook is gone."""
        for event in events:
            for packet in packets.cut(frame(event), _PACKET):
                self._write(packet)

    def beat(self) -> None:
        """Say that the agent lives, where it is time to do so."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + packets.BEAT_SECONDS
            self._write(packets.BEAT)

    def _write(self, packet: bytes) -> None:
        rest = memoryview(packet)
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
            self._orders += self._frames.feed(self._packets.feed(data))
        if self._quiet is not None and self._quiet.look(time.monotonic(), heard=heard):
            self._is_over = True
