"""Frames of events on byte streams that are split anywhere."""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from ..events import Buffer, Event, Failure, as_bytes


class PipeEnd(Protocol):
    """One end of a `multiprocessing` pipe."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


GO = b"g"
"""What the notebook sends on each worker's event socket when all workers are started."""
BETWEEN = b"\n"
"""May stand between frames, and means nothing: srun passes on what it gets by lines."""
_COUNT = struct.Struct("!I")
_LENGTH = struct.Struct("!Q")
_MAX_PARTS = 1 << 20
_SMALL_BYTES = 1 << 16


def frame(event: Event) -> list[memoryview]:
    """Return the buffers to send for one event.

    Args:
        event: the event.

    Returns:
        A header with the number of parts and the length of each, then the parts, which are not copied.
    """
    parts = [as_bytes(part) for part in encode(event)]
    header = bytearray(_COUNT.pack(len(parts)))
    for part in parts:
        header += _LENGTH.pack(part.nbytes)
    return [memoryview(header), *parts]


def frame_lines(events: Iterable[Event]) -> Iterator[Buffer]:
    """Yield the buffers to send for events by srun, ssh or TCP: small parts are joined, and `BETWEEN` is the last.

    Args:
        events: in order.
    """
    small = bytearray()
    for event in events:
        for part in frame(event):
            if part.nbytes > _SMALL_BYTES:
                yield bytes(small)
                yield part
                small.clear()
            else:
                small += part
    yield bytes(small + BETWEEN)


class FrameError(ConnectionError):
    """Received bytes are no frames of events: whoever reads them treats the connection as one that has ended.

    Nothing after them can be read either. The notebook counts the rank as lost, and says why; a worker hears no more
    orders.

    Args:
        reason: what is wrong with them.
        events: those that came before.
    """

    def __init__(self, reason: str, events: Sequence[Event] = ()) -> None:
        super().__init__(reason)
        self.events = events


def describe_loss(rank: int, error: FrameError, sender: str) -> Failure:
    """Return the failure of a rank whose connection ended because of what came on it.

    Args:
        rank: of the worker at one end.
        error: what is wrong.
        sender: whose bytes they are, such as `it`.
    """
    why = f"what {sender} sends cannot be read ({error}); other code may have written to its connection"
    return Failure(rank=rank, time=time.time(), pid=0, lost=why, moment=time.monotonic())


class FrameReader:
    """Collects received bytes and returns the events that are complete.

    A frame may run code, because events are pickles: read those of processes that have proven what they are. Memory
    grows with the bytes that come, whatever a header says.
    """

    def __init__(self) -> None:
        self._received = bytearray()
        self._needed = _COUNT.size

    def feed(self, data: bytes) -> list[Event]:
        """Add bytes, and return the events that they complete.

        Args:
            data: as received.

        Raises:
            FrameError: they are no frames; it has the events before them.
        """
        events: list[Event] = []
        try:
            self._feed(data, events)
        except FrameError as error:
            raise FrameError(str(error), events) from error.__cause__
        return events

    def _feed(self, data: bytes, events: list[Event]) -> None:
        self._received += data
        start = 0
        while len(self._received) - start >= self._needed:
            if self._needed == _COUNT.size and self._received.startswith(BETWEEN, start):
                start += 1  # the first byte of a count is 0
                continue
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
            events.append(_decode(parts))
        del self._received[:start]

    def _lengths(self, start: int) -> list[int] | None:
        """Return the lengths of the parts and set `_needed` to the frame's size; None while the frame is incomplete."""
        (count,) = _COUNT.unpack_from(self._received, start)
        if not 0 < count <= _MAX_PARTS:
            raise FrameError(f"a frame has {count} parts")
        header = _COUNT.size + count * _LENGTH.size
        available = len(self._received) - start
        if available < header:
            self._needed = header
            return None
        first = start + _COUNT.size
        lengths = [_LENGTH.unpack_from(self._received, first + i * _LENGTH.size)[0] for i in range(count)]
        self._needed = header + sum(lengths)
        return lengths if available >= self._needed else None


def _decode(parts: list[bytearray]) -> Event:
    try:
        return decode(parts)
    except Exception as error:  # unpickling has no end of ways to fail
        raise FrameError(f"a frame is no event: {type(error).__name__}: {error}") from error


def encode(event: Event) -> list[Buffer]:
    """Return an event as bytes: its pickle, then its out-of-band buffers, which are not copied."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(event, protocol=5, buffer_callback=buffers.append)
    return [head, *buffers]


def decode(parts: Sequence[Buffer]) -> Event:
    """Return the event of what `encode` returned; unpickling is safe only for bytes of our own workers."""
    event = pickle.loads(parts[0], buffers=parts[1:])
    if not isinstance(event, Event):
        raise TypeError(f"a {type(event).__name__} is no event")
    return event
