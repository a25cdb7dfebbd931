"""Frames of events and lines of text on byte streams that split them anywhere."""

from __future__ import annotations

import struct
from typing import Protocol

from ..events import Buffer, Event, decode, encode


class PipeEnd(Protocol):
    """One end of a `multiprocessing` pipe, whose class depends on the system."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...
    def poll(self, timeout: float = 0.0, /) -> bool: ...
    def recv_bytes(self) -> bytes: ...


GO = b"g"
"""The notebook's word, on a worker's event socket, that all workers are started."""
_COUNT = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")

_MAX_LINE = 1 << 20


def frame(event: Event) -> list[memoryview]:
    """Return the buffers to send for one event: number of parts, length of each, the parts (not copied)."""
    parts = [_raw(part) for part in encode(event)]
    header = bytearray(_COUNT.pack(len(parts)))
    for part in parts:
        header += _LENGTH.pack(part.nbytes)
    return [memoryview(header), *parts]


def _raw(part: Buffer) -> memoryview:
    view = part if isinstance(part, memoryview) else memoryview(part)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class FrameReader:
    """Collects received bytes and gives the events that are complete."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._needed = _COUNT.size

    def feed(self, data: bytes) -> list[Event]:
        """Take bytes as received; return the events that they complete."""
        events = []
        self._received += data
        start = 0
        while len(self._received) - start >= self._needed:
            lengths = self._lengths(start)
            if lengths is None:
                break
            end = start + self._needed
            position = end - sum(lengths)
            parts = []
            for length in lengths:
                parts.append(self._received[position : position + length])
                position += length
            start = end
            self._needed = _COUNT.size
            events.append(decode(parts))
        del self._received[:start]
        return events

    def _lengths(self, start: int) -> list[int] | None:
        """Return the parts' lengths and set the frame's size as needed; None while the frame is incomplete."""
        (count,) = _COUNT.unpack_from(self._received, start)
        header = _COUNT.size + count * _LENGTH.size
        available = len(self._received) - start
        if available < header:
            self._needed = header
            return None
        first = start + _COUNT.size
        lengths = [_LENGTH.unpack_from(self._received, first + i * _LENGTH.size)[0] for i in range(count)]
        self._needed = header + sum(lengths)
        return lengths if available >= self._needed else None


class LineReader:
    """Collects received bytes and gives whole lines as text.

    A carriage return inside a line overwrites what stood before it, as on a terminal. Bytes that are no UTF-8
    come as backslash escapes. A line of more than 1 MiB is cut there.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes as received; return the lines that they complete."""
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        lines = _texts(whole) if newline else []
        rest = _visible(rest)
        while len(rest) > _MAX_LINE:
            lines.append(_text(rest[:_MAX_LINE]))
            rest = rest[_MAX_LINE:]
        self._rest = rest
        return lines

    def close(self) -> list[str]:
        """Return the last line where it has no newline."""
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _visible(line: bytes) -> bytes:
    """Return what carriage returns leave of an unfinished line; one at its end has overwritten nothing yet."""
    shown = line.rstrip(b"\r")
    return shown[shown.rfind(b"\r") + 1 :] + (b"\r" if len(shown) < len(line) else b"")


def _texts(lines: bytes) -> list[str]:
    if b"\r" in lines:
        return [_text(line) for line in lines.split(b"\n")]
    return lines.decode("utf-8", "backslashreplace").split("\n")


def _text(line: bytes) -> str:
    line = _visible(line).rstrip(b"\r")
    return line.decode("utf-8", "backslashreplace")
