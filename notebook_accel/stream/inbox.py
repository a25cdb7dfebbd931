"""The notebook's ends of the workers' sockets and pipes."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..events import Chunk, Event, Line, Order, Progress, Stream
from .readable import count_unread_bytes
from .wire import FrameReader, LineReader, PipeEnd, frame

Channel = Literal["events", "stdout", "stderr"]
CHANNELS: tuple[Channel, ...] = ("events", "stdout", "stderr")
End = socket.socket | PipeEnd
_CHUNK = 1 << 18
_EMPTY_SECONDS = 0.01
_GATHER_SECONDS = 0.01  # between two reads of output: waking up for each line would double its time


@dataclass(kw_only=True, slots=True)
class _Source:
    rank: int
    channel: Channel
    end: End
    frames: FrameReader = field(default_factory=FrameReader)
    lines: dict[Stream, LineReader] = field(default_factory=dict)
    outgoing: deque[memoryview] = field(default_factory=deque)
    is_open: bool = True

    def receive(self) -> bytes:
        if isinstance(self.end, socket.socket):
            return self.end.recv(_CHUNK)
        return os.read(self.end.fileno(), _CHUNK)

    def count_reads(self) -> int:
        """Return how many calls of `receive` take all that is there now, and perhaps an end."""
        if sys.platform == "win32":  # no other process has these sockets
            return sys.maxsize
        return count_unread_bytes(self.end.fileno()) // _CHUNK + 1 if self.is_open else 0

    def take(self, data: bytes) -> list[Event]:
        if self.channel != "events":
            return self._lines(self.channel, data)
        events: list[Event] = []
        for event in self.frames.feed(data):
            events += self._lines(event.stream, event.data) if isinstance(event, Chunk) else [event]
        return events

    def finish(self) -> list[Event]:
        rests = [(stream, reader.close()) for stream, reader in self.lines.items()]
        return [event for stream, texts in rests for event in self._events(stream, texts)]

    def bars(self) -> list[Event]:
        """Return a bar for each line that no newline has ended yet."""
        texts = {stream: reader.unfinished for stream, reader in self.lines.items()}
        return [_bar(self.rank, stream, text) for stream, text in texts.items() if text]

    def _lines(self, stream: Stream, data: bytes) -> list[Event]:
        return self._events(stream, self.lines.setdefault(stream, LineReader()).feed(data))

    def _events(self, stream: Stream, texts: list[str]) -> list[Event]:
        now = time.time()
        return [Line(rank=self.rank, time=now, stream=stream, text=text) for text in texts]


def _bar(rank: int, stream: Stream, text: str) -> Progress:
    return Progress(
        rank=rank,
        time=time.time(),
        bar=CHANNELS.index(stream),
        description="",
        count=0.0,
        total=None,
        text=text,
        finished=False,
        leave=False,
    )


class Inbox:
    """Receives the events and output of any number of workers.

    Attributes:
        shows_unfinished: whether a line that no newline has ended yet comes as a bar, each time that it has changed.
    """

    def __init__(self) -> None:
        self.shows_unfinished = False
        self._selector = selectors.DefaultSelector()
        self._urgent = selectors.DefaultSelector()  # everything but output: it is read at once
        self._output_read = 0.0  # time of the last read of output
        self._sources: dict[int, list[_Source]] = {}
        self._sending = threading.Lock()

    def add(self, rank: int, ends: Mapping[Channel, End]) -> None:
        """Receive from a worker.

        Args:
            rank: of the worker.
            ends: our ends of its socket and pipes; the inbox closes them.
        """
        sources = []
        for channel, end in ends.items():
            if isinstance(end, socket.socket):
                end.setblocking(False)
            elif sys.platform != "win32":
                os.set_blocking(end.fileno(), False)
            source = _Source(rank=rank, channel=channel, end=end)
            self._selector.register(end, selectors.EVENT_READ, source)
            if channel == "events":
                self._urgent.register(end, selectors.EVENT_READ)
            sources.append(source)
        self._sources[rank] = sources

    def tell_all(self, word: bytes) -> None:
        """Send a word to every worker on its event socket. Workers that have ended are skipped.

        Args:
            word: bytes that the workers wait for.
        """
        for sources in self._sources.values():
            events = next(source.end for source in sources if source.channel == "events")
            assert isinstance(events, socket.socket)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                events.sendall(word)

    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank. A worker that has ended is skipped.

        Any thread may call it. It never waits: what the socket does not take at once is sent by later polls.

        Args:
            order: with the rank.
        """
        for source in self._sources.get(order.rank, []):
            if source.channel == "events":
                with self._sending:
                    source.outgoing.extend(frame(order))
                    self._send(source)

    def _send(self, source: _Source) -> None:
        if not source.is_open:
            return
        assert isinstance(source.end, socket.socket)
        try:
            while source.outgoing:
                part = source.outgoing[0]
                sent = source.end.send(part)
                if sent == part.nbytes:
                    source.outgoing.popleft()
                else:
                    source.outgoing[0] = part[sent:]
        except BlockingIOError:
            pass
        except OSError:  # the worker has ended, or its machine is down
            source.outgoing.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if source.outgoing else 0)
        if self._selector.get_key(source.end).events != wanted:
            self._selector.modify(source.end, wanted, source)

    def is_open(self, rank: int) -> bool:
        """Return True if anything of a worker may still come.

        Args:
            rank: of the worker.
        """
        return any(source.is_open for source in self._sources.get(rank, []))

    def watch(self, fd: int) -> None:
        """Let `poll` return when this descriptor becomes readable.

        Args:
            fd: for example a process's sentinel.
        """
        self._selector.register(fd, selectors.EVENT_READ, None)
        self._urgent.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor.

        Args:
            fd: as given to `watch`.
        """
        self._selector.unregister(fd)
        self._urgent.unregister(fd)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        sources = [source for sources in list(self._sources.values()) for source in sources]
        fds = [source.end.fileno() for source in sources if source.is_open]
        for selector in (self._selector, self._urgent):
            if sys.platform == "linux" and isinstance(selector, selectors.EpollSelector):
                fds.append(selector.fileno())
        return fds

    def poll(self, timeout: float) -> list[Event]:
        """Wait for events and output, and return them.

        Events come before output: a worker that shows a display waits until its earlier output was read. Output that
        follows other output closely is collected for some milliseconds.

        Args:
            timeout: seconds to wait at most.
        """
        if not self._selector.get_map():  # on Windows `select` refuses to wait for nothing
            time.sleep(min(timeout, _EMPTY_SECONDS))
            return []
        self._gather(timeout)
        selected = [(key.data, mask) for key, mask in self._selector.select(timeout) if key.data is not None]
        for source, mask in selected:
            if mask & selectors.EVENT_WRITE:
                with self._sending:
                    self._send(source)
        ready = [source for source, mask in selected if mask & selectors.EVENT_READ]
        ready.sort(key=lambda source: CHANNELS.index(source.channel))
        if ready and ready[-1].channel != "events":
            self._output_read = time.monotonic()
        return [event for source in ready for event in self._read(source)]

    def _gather(self, timeout: float) -> None:
        """Wait for more output if some was read just now; anything else ends the wait."""
        seconds = min(timeout, self._output_read + _GATHER_SECONDS - time.monotonic())
        if seconds > 0 and self._urgent.get_map():
            self._urgent.select(seconds)

    def drain(self, rank: int) -> list[Event]:
        """Return what a worker has written so far, with its last line even if no newline ends it.

        Args:
            rank: of the worker.
        """
        events: list[Event] = []
        for source in self._sources.get(rank, []):
            if source.channel != "events" and source.is_open:
                events += self._read(source)  # all that a pipe holds
            if source.is_open:
                events += source.finish()
        return events

    def finish(self, rank: int) -> list[Event]:
        """Return all that an ended worker left in its sockets, and close them.

        What others write meanwhile is not waited for: processes that the worker left behind may write for ever.

        Args:
            rank: of the worker.
        """
        events: list[Event] = []
        for source in self._sources.pop(rank, []):
            for _ in range(source.count_reads()):
                more = self._read(source)
                events += more
                if more is _NOTHING or not source.is_open:
                    break
            if source.is_open:
                events += self._close(source)
        return events

    def close(self) -> None:
        """Close everything. What was not read is lost."""
        for rank in list(self._sources):
            for source in self._sources.pop(rank):
                if source.is_open:
                    self._close(source)
        self._selector.close()
        self._urgent.close()

    def _read(self, source: _Source) -> list[Event]:
        try:
            data = source.receive()
        except BlockingIOError:
            return _NOTHING
        except OSError:  # the connection was reset, or the worker's machine is down
            data = b""
        if not data:
            return self._close(source)
        events = source.take(data)
        return [*events, *source.bars()] if self.shows_unfinished else events

    def _close(self, source: _Source) -> list[Event]:
        with self._sending:
            self._selector.unregister(source.end)
            if source.channel == "events":
                self._urgent.unregister(source.end)
            source.end.close()
            source.is_open = False
        return source.finish()


_NOTHING: list[Event] = []
