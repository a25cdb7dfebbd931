"""The notebook's end of the workers' sockets."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Literal

from ..events import Event, Line
from .wire import FrameReader, LineReader

Channel = Literal["events", "stdout", "stderr"]
CHANNELS: tuple[Channel, ...] = ("events", "stdout", "stderr")
End = socket.socket | Connection
_CHUNK = 1 << 18


@dataclass(kw_only=True, slots=True)
class _Source:
    rank: int
    channel: Channel
    end: End
    lines: LineReader = field(default_factory=LineReader)
    frames: FrameReader = field(default_factory=FrameReader)
    is_open: bool = True

    def take(self, data: bytes) -> list[Event]:
        if self.channel == "events":
            return self.frames.feed(data)
        return self._lines(self.lines.feed(data))

    def finish(self) -> list[Event]:
        return [] if self.channel == "events" else self._lines(self.lines.close())

    def _lines(self, texts: list[str]) -> list[Event]:
        assert self.channel != "events"
        now = time.time()
        return [Line(rank=self.rank, time=now, stream=self.channel, text=text) for text in texts]


class Inbox:
    """Receives the events and output of any number of workers."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._sources: dict[int, list[_Source]] = {}

    def add(self, rank: int, ends: dict[Channel, End]) -> None:
        """Receive from our ends of a worker's socket and pipes; the inbox closes them."""
        sources = []
        for channel in CHANNELS:
            end = ends[channel]
            os.set_blocking(end.fileno(), False)
            source = _Source(rank=rank, channel=channel, end=end)
            self._selector.register(end, selectors.EVENT_READ, source)
            sources.append(source)
        self._sources[rank] = sources

    def tell_all(self, word: bytes) -> None:
        """Send a word to every worker on its event socket; one that has ended does not hear it."""
        for sources in self._sources.values():
            events = next(source.end for source in sources if source.channel == "events")
            assert isinstance(events, socket.socket)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                events.sendall(word)

    def watch(self, fd: int) -> None:
        """Let `poll` return when this descriptor (a process's sentinel) becomes readable."""
        self._selector.register(fd, selectors.EVENT_READ, None)

    def unwatch(self, fd: int) -> None:
        """Take a watched descriptor back."""
        self._selector.unregister(fd)

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked worker must close."""
        fds = [source.end.fileno() for sources in self._sources.values() for source in sources]
        if isinstance(self._selector, getattr(selectors, "EpollSelector", ())):
            fds.append(self._selector.fileno())
        return fds

    def poll(self, timeout: float) -> list[Event]:
        """Wait up to `timeout` seconds for anything; return what came.

        Events come before output: a worker waits with a display until its earlier output was read.
        """
        ready = [key.data for key, _ in self._selector.select(timeout) if key.data is not None]
        ready.sort(key=lambda source: CHANNELS.index(source.channel))
        return [event for source in ready for event in self._read(source)]

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

    def _read(self, source: _Source) -> list[Event]:
        try:
            data = os.read(source.end.fileno(), _CHUNK)
        except BlockingIOError:
            return _NOTHING
        except ConnectionResetError:
            data = b""
        return source.take(data) if data else self._close(source)

    def _close(self, source: _Source) -> list[Event]:
        self._selector.unregister(source.end)
        source.end.close()
        source.is_open = False
        return source.finish()


_NOTHING: list[Event] = []
