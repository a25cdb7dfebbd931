"""The notebook's end of the workers' sockets."""

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

from ..events import Chunk, Event, Line, Order, Stream
from .wire import FrameReader, LineReader, PipeEnd, frame

Channel = Literal["events", "stdout", "stderr"]
CHANNELS: tuple[Channel, ...] = ("events", "stdout", "stderr")
End = socket.socket | PipeEnd
_CHUNK = 1 << 18
_EMPTY_SECONDS = 0.01
_GATHER_SECONDS = 0.01  # between two looks at output: to wake up for each line takes as long as the line did


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

    def _lines(self, stream: Stream, data: bytes) -> list[Event]:
        return self._events(stream, self.lines.setdefault(stream, LineReader()).feed(data))

    def _events(self, stream: Stream, texts: list[str]) -> list[Event]:
        now = time.time()
        return [Line(rank=self.rank, time=now, stream=stream, text=text) for text in texts]


class Inbox:
    """Receives the events and output of any number of workers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._urgent = selectors.DefaultSelector()  # what does not wait until more comes: all but output
        self._output_read = 0.0  # when
        self._sources: dict[int, list[_Source]] = {}
        self._sending = threading.Lock()

    def add(self, rank: int, ends: Mapping[Channel, End]) -> None:
        """Receive from our ends of a worker's socket and pipes; the inbox closes them."""
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
        """Send a word to every worker on its event socket; one that has ended does not hear it."""
        for sources in self._sources.values():
            events = next(source.end for source in sources if source.channel == "events")
            assert isinstance(events, socket.socket)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                events.sendall(word)

    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank; one that has ended does not hear it.

        Any thread may do it. It never waits: what the socket does not take at once goes with the polls to come.
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
        except OSError:  # it has ended, or its machine is gone
            source.outgoing.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if source.outgoing else 0)
        if self._selector.get_key(source.end).events != wanted:
            self._selector.modify(source.end, wanted, source)

    def is_open(self, rank: int) -> bool:
        """Return whether anything of a worker may still come."""
        return any(source.is_open for source in self._sources.get(rank, []))

    def watch(self, fd: int) -> None:
        """Let `poll` return when this descriptor (a process's sentinel) becomes readable."""
        self._selector.register(fd, selectors.EVENT_READ, None)
        self._urgent.register(fd, selectors.EVENT_READ)

    def unwatch(self, fd: int) -> None:
        """Take a watched descriptor back."""
        self._selector.unregister(fd)
        self._urgent.unregister(fd)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked worker must close."""
        fds = [source.end.fileno() for sources in self._sources.values() for source in sources]
        for selector in (self._selector, self._urgent):
            if sys.platform == "linux" and isinstance(selector, selectors.EpollSelector):
                fds.append(selector.fileno())
        return fds

    def poll(self, timeout: float) -> list[Event]:
        """Wait up to `timeout` seconds for anything; return what came.

        Events come before output: a worker waits with a display until its earlier output was read. Output that follows
        output closely is gathered for some milliseconds.
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
        """Let output become more where some was read just now; whatever else comes ends the wait."""
        seconds = min(timeout, self._output_read + _GATHER_SECONDS - time.monotonic())
        if seconds > 0 and self._urgent.get_map():
            self._urgent.select(seconds)

    def drain(self, rank: int) -> list[Event]:
        """Return what a worker has written so far, its last line also where no newline ends it."""
        events: list[Event] = []
        for source in self._sources.get(rank, []):
            if source.channel != "events" and source.is_open:
                events += self._read(source)  # all that a pipe holds
            if source.is_open:
                events += source.finish()
        return events

    def finish(self, rank: int) -> list[Event]:
        """Return all that an ended worker left in its sockets, and close them."""
        events: list[Event] = []
        for source in self._sources.pop(rank, []):
            while source.is_open and (more := self._read(source)) is not _NOTHING:
                events += more
            if source.is_open:
                events += self._close(source)
        return events

    def close(self) -> None:
        """Close everything; what was not read is lost."""
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
        except OSError:  # reset, or its machine is gone
            data = b""
        return source.take(data) if data else self._close(source)

    def _close(self, source: _Source) -> list[Event]:
        with self._sending:
            self._selector.unregister(source.end)
            if source.channel == "events":
                self._urgent.unregister(source.end)
            source.end.close()
            source.is_open = False
        return source.finish()


_NOTHING: list[Event] = []
