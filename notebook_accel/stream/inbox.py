"""The notebook's ends of the workers' sockets and pipes."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..events import CallEnd, Event, Lines, Order, Unfinished
from .lines import LineReader
from .readable import count_unread_bytes
from .wire import FrameError, FrameReader, PipeEnd, describe_loss, frame

Channel = Literal["events", "stdout", "stderr"]
CHANNELS: tuple[Channel, ...] = ("events", "stdout", "stderr")
End = socket.socket | PipeEnd
_CHUNK = 1 << 18
_EMPTY_SECONDS = 0.01
_UNFINISHED_SECONDS = 0.15  # a line is shown unfinished where it is older, and at most so often
_MAX_UNFINISHED = 4_000
_GATHER_SECONDS = 0.01  # between two reads of output: waking up for each line would double its time


@dataclass(kw_only=True, slots=True, eq=False)
class _Source:
    """One of our ends of a worker's socket and pipes.

    Attributes:
        lines: reads its output.
        has_news: whether its unfinished line has changed since it was shown.
        is_standing: whether an unfinished line is shown.
        shown: when a line, or an unfinished one, was shown last, by the monotonic clock; first, when output began.
    """

    rank: int
    channel: Channel
    end: End
    frames: FrameReader = field(default_factory=FrameReader)
    lines: LineReader = field(default_factory=LineReader)
    has_news: bool = False
    is_standing: bool = False
    shown: float = math.inf
    outgoing: deque[memoryview] = field(default_factory=deque)
    is_open: bool = True

    def receive(self) -> bytes:
        if isinstance(self.end, socket.socket):
            return self.end.recv(_CHUNK)
        return os.read(self.end.fileno(), _CHUNK)

    def count_reads(self) -> int:
        """Return how many calls of `receive` take all that is there now, and perhaps an end."""
        if not self.is_open:
            return 0
        return count_unread_bytes(self.end.fileno()) // _CHUNK + 1

    def take(self, data: bytes) -> list[Event]:
        if self.channel != "events":
            return self._read_lines(data)
        try:
            return self._check_ranks(self.frames.feed(data))
        except FrameError as error:
            raise FrameError(str(error), self._check_ranks(error.events)) from error.__cause__

    def _check_ranks(self, received: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in received:
            if event.rank != self.rank:
                raise FrameError(f"an event of rank {event.rank} from rank {self.rank}", events)
            events.append(event)
        return events

    def finish(self) -> list[Event]:
        events = self._make_lines(self.lines.close())
        if self.is_standing and not events:  # nothing else would remove it
            events = [self._make_unfinished("")]
        self.has_news = self.is_standing = False
        return events

    def show_unfinished(self, now: float) -> list[Event]:
        """Return what no line has shown yet for some time; bars that nobody goes back to become lines.

        Args:
            now: by the monotonic clock.
        """
        if not self.has_news or now - self.shown < _UNFINISHED_SECONDS:
            return []
        self.has_news = False
        self.shown = now
        events = self._make_lines(self.lines.settle())
        text = self.lines.unfinished[:_MAX_UNFINISHED]
        self.is_standing = bool(text.strip())
        return [*events, self._make_unfinished(text)]

    def _read_lines(self, data: bytes) -> list[Event]:
        texts = self.lines.feed(data)
        if texts or self.shown == math.inf:
            self.shown = time.monotonic()
        self.has_news = self.lines.has_more
        if not texts and not self.has_news and self.is_standing:  # nothing else would remove it
            self.is_standing = False
            return [self._make_unfinished("")]
        return self._make_lines(texts)

    def _make_lines(self, texts: list[str]) -> list[Event]:
        if not texts:
            return []
        assert self.channel != "events"
        return [Lines(rank=self.rank, time=time.time(), stream=self.channel, texts=tuple(texts))]

    def _make_unfinished(self, text: str) -> Unfinished:
        assert self.channel != "events"
        return Unfinished(rank=self.rank, time=time.time(), stream=self.channel, text=text)


class Inbox:
    """Receives the events and output of any number of workers.

    What was written without a newline comes as `Unfinished`, where no line has come for some time, and again after
    further writes.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._urgent = selectors.DefaultSelector()  # everything but output: it is read at once
        self._output_read = 0.0  # time of the last read of output
        self._sources: dict[int, list[_Source]] = {}
        self._with_news: set[_Source] = set()  # unfinished lines that were not shown yet
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
            else:
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
            source = next(source for source in sources if source.channel == "events")
            if not source.is_open:
                continue
            events = source.end
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
        follows other output closely is collected for some milliseconds. What was written in a call of a session comes
        before the end of that call.

        Args:
            timeout: seconds to wait at most.
        """
        if not self._selector.get_map():  # nothing would end the wait
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
        events = [event for source in ready for event in self._read(source)]
        if ends := [event for event in events if isinstance(event, CallEnd)]:
            events += [event for end in ends for event in self.drain(end.rank)]
            events.sort(key=_is_call_end)
        return events + self._show_unfinished() if self._with_news else events

    def _show_unfinished(self) -> list[Event]:
        now, events = time.monotonic(), list[Event]()
        for source in list(self._with_news):
            events += source.show_unfinished(now)
            if not source.has_news:
                self._with_news.discard(source)
        return events

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
                if source.is_open:
                    events += self._read(source)
            if source.is_open:
                events += self._close(source)
        return sorted(events, key=_is_call_end)

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
            if not data:
                return self._close(source)
            events = source.take(data)
        except BlockingIOError:
            return []
        except FrameError as error:
            return [*error.events, *self._close(source), describe_loss(source.rank, error, "it")]
        except OSError:  # the connection was reset, or the worker's machine is down
            return self._close(source)
        if source.has_news:
            self._with_news.add(source)
        return events

    def _close(self, source: _Source) -> list[Event]:
        with self._sending:
            self._selector.unregister(source.end)
            if source.channel == "events":
                self._urgent.unregister(source.end)
            source.is_open = False
            source.end.close()
        return source.finish()


def _is_call_end(event: Event) -> bool:
    return isinstance(event, CallEnd)
