"""Packets on the pipes of the program that leads to a host: bytes of frames, and beats between them.

Beats come from another process than the frames, into the same pipe. No write of a packet to a host is larger than what
the system writes in one piece, so neither cuts the other in two.
"""

from __future__ import annotations

import select
import struct
from collections.abc import Iterator, Sequence
from typing import Final

_LENGTH: Final = struct.Struct("!I")
_END: Final = b"\n"  # srun passes on what processes write by the line
_AROUND: Final = _LENGTH.size + len(_END)
_MOST: Final = 1 << 30
PIECE: Final = select.PIPE_BUF
"""How many bytes the system writes to a pipe in one piece."""
BEAT: Final = _LENGTH.pack(0) + _END
BEAT_SECONDS: Final = 2.0
SILENCE_SECONDS: Final = 10.0
"""How long an end waits for anything of the other one before it takes it for gone."""


def cut(buffers: Sequence[memoryview], size: int = PIECE) -> Iterator[bytes]:
    """Yield the packets for some bytes, one after the other.

    Args:
        buffers: the bytes.
        size: of a packet at most, with what is around its bytes.
    """
    room = size - _AROUND
    small: list[memoryview] = []
    count = 0
    for buffer in buffers:
        start = 0
        while start < buffer.nbytes:
            part = buffer[start : start + room - count]
            small.append(part)
            count += part.nbytes
            start += part.nbytes
            if count == room:
                yield b"".join([_LENGTH.pack(count), *small, _END])
                small, count = [], 0
    if count:
        yield b"".join([_LENGTH.pack(count), *small, _END])


class PacketReader:
    """Takes packets apart.

    Attributes:
        beats: how many beats have come.
    """

    def __init__(self) -> None:
        self.beats = 0
        self._received = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Add bytes as received, and return the bytes of frames in the packets that are complete.

        Raises:
            ConnectionError: they are no packets.
        """
        self._received += data
        found: list[bytes | bytearray] = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > _MOST:
                raise ConnectionError("what came is no packet: other code has written to the connection")
            end = start + _LENGTH.size + length
            if len(self._received) < end + len(_END):
                break
            self.beats += length == 0
            found.append(self._received[start + _LENGTH.size : end])
            start = end + len(_END)
        del self._received[:start]
        return b"".join(found)


class Quiet:
    """Notices that an end says nothing any more.

    Only time between two looks counts, and of each at most a second: a process that stood still has heard nothing
    meanwhile, and what came is still to be read.

    Args:
        now: the time, by the monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._looked = now
        self._seconds = 0.0

    def look(self, now: float, *, heard: bool) -> bool:
        """Note a look, and return whether it has been silent for too long.

        Args:
            now: the time, by the monotonic clock.
            heard: whether something had come.
        """
        self._seconds = 0.0 if heard else self._seconds + min(now - self._looked, 1.0)
        self._looked = now
        return self._seconds > SILENCE_SECONDS
