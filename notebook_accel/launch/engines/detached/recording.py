"""The events of a run that outlives its notebook, in files: one process writes them, any number reads them.

What ranks return and raise is in files of its own. Everything else is in segments of bounded size: the first one stays,
and of the others the newest ones. Each segment begins with what a reader has to know who has not seen those before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ....errors import LaunchError
from ....events import (
    Event,
    Failure,
    Held,
    Lines,
    Notice,
    Phase,
    Progress,
    Pulse,
    RaisedError,
    Result,
    Unfinished,
)
from ....stream.wire import FrameReader, frame

FIRST_BYTES: Final = 16 << 20
"""Size of the first segment of a run, which is never removed."""
LAST_BYTES: Final = 256 << 20
"""Size of the others together, of which the oldest ones are removed."""
_SEGMENT_BYTES: Final = 32 << 20
_READ_BYTES: Final = 4 << 20
_SYNC_SECONDS: Final = 1.0  # other machines see what is synced
_SLOWEST_SECONDS: Final = 10.0
_SLOWER_AFTER: Final = 600.0
_LAST_SECONDS: Final = 600.0
_MAX_WAITING: Final = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Over(Event):
    """The run has ended; nothing follows.

    Attributes:
        stopped: ranks that were ended.
        was_stopped: whether somebody asked for that.
        hang: the report of the hang that ended it, else empty.
        error: what ended it, where that is no failure of a rank.
        was_asked: whether somebody asked the run to stop, and its ranks have perhaps returned by themselves.
    """

    stopped: Sequence[int] = ()
    was_stopped: bool = False
    hang: str = ""
    error: RaisedError | None = None
    was_asked: bool = False

    def describe_status(self, *, has_failed_ranks: bool) -> str:
        """Return how the run has ended, as `Run.status` has it."""
        if self.error or self.hang or (has_failed_ranks and not self.was_stopped):
            return "failed"
        return "stopped" if self.was_stopped or self.was_asked else "done"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive(Event):
    """The process that writes can do so; told where there was nothing else to write for some time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Event):
    """SLURM ends the job, and nothing follows of this start of it; SLURM says how it ended, or starts it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored(Event):
    """What a rank has returned or raised is in a file of its own, `name`."""

    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot(Event):
    """How things stand where a segment begins, for a reader who has not seen what was before."""

    events: Sequence[Event]


class Recording:
    """Where the events of a run are.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, start: int, segment: int) -> Path:
        """Return the path of a segment.

        Args:
            start: how often the process that writes was started before; SLURM may start it again.
            segment: its number in that start.
        """
        return self.folder / f"events-{start}.{segment}"

    def find_next(self, start: int, segment: int) -> tuple[int, int] | None:
        """Return the segment that comes after one; None where there is none.

        A start that was ended before it told anything has left nothing.
        """
        found: list[tuple[int, int]] = []
        for each in self.folder.glob("events-*.*"):
            parts = each.name.removeprefix("events-").split(".")
            if all(part.isdecimal() for part in parts):
                found.append((int(parts[0]), int(parts[1])))
        return min((place for place in found if place > (start, segment)), default=None)


@dataclass(kw_only=True, slots=True)
class _Unsaved:
    """What a rank has returned or raised, and the file that it is to be in."""

    name: str
    event: Event


class Writer:
    """Writes the events of a run. Of bars and pulses it writes the newest state, in longer and longer steps.

    Where the disk is full, it goes on: output is left out and counted, and what ranks returned or raised waits.

    Args:
        recording: where; no other process writes there.
        start: number of this start.
    """

    def __init__(self, recording: Recording, start: int) -> None:
        self._recording, self._start = recording, start
        self._segment = 0
        self._file = self._open()
        self._size = 0
        self._waiting = bytearray()
        self._unsaved: list[_Unsaved] = []
        self._num_kept = self._num_dropped = 0
        self._standing: dict[tuple[object, ...], Event] = {}
        self._changing: dict[tuple[object, ...], Event] = {}
        self._began = self._synced = self._drawn = self._added = time.monotonic()
        self._is_dirty = self._is_disk_full = False

    def _open(self) -> int:
        path = self._recording.find(self._start, self._segment)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, events: Sequence[Event]) -> None:
        """Write events, and what is due.

        Args:
            events: in order; it is called several times a second, also without any.
        """
        for event in events:
            self._take(event)
        now = time.monotonic()
        if self._changing and now - self._drawn >= min(
            _SLOWEST_SECONDS, 1 + (now - self._began) / _SLOWER_AFTER
        ):
            self._flush_changing()
        if now - self._added >= _SLOWEST_SECONDS:
            self._add(Alive(rank=-1, time=time.time()))
        self._send()
        if self._is_dirty and now - self._synced >= _SYNC_SECONDS:
            self._sync()

    def close(self, over: Over) -> None:
        """Write the end of the run; a full disk is waited for, some minutes.

        Raises:
            OSError: it stays full.
        """
        deadline = time.monotonic() + _LAST_SECONDS
        self._flush_changing()
        self._send_all(deadline)
        self._add(over)
        self._send_all(deadline)
        self._sync()
        os.close(self._file)

    def _send_all(self, deadline: float) -> None:
        self._send()
        while self._waiting or self._unsaved or self._num_dropped:
            if time.monotonic() > deadline:
                raise OSError(errno.ENOSPC, "the end of the run could not be written")
            time.sleep(_SYNC_SECONDS)
            self._send()

    def leave(self) -> None:
        """Write what is there, without an end of the run: the job may start again, or SLURM says how it ended."""
        self._flush_changing()
        self._add(Left(rank=-1, time=time.time()))
        self._send()
        self._sync()
        os.close(self._file)

    def _take(self, event: Event) -> None:
        if isinstance(event, Held):
            return  # between launcher and rank
        if isinstance(event, Phase) and event.name == "restarting":
            self._changing.clear()
            self._standing.clear()
            self._unsaved.clear()  # of an attempt that is over
        key = _find_key(event)
        if key is not None:
            if isinstance(event, Lines) or (isinstance(event, Progress) and event.finished):
                self._changing.pop(key, None)
            else:
                self._changing[key] = event
                return
        if isinstance(event, (Result, Failure)):
            self._keep(event)
        else:
            self._add(event)

    def _keep(self, event: Result | Failure) -> None:
        """Write what a rank has returned or raised to a file of its own."""
        self._num_kept += 1
        name = f"kept-{self._start}.{self._num_kept}"
        self._unsaved.append(_Unsaved(name=name, event=_strip(event)))
        self._save()

    def _save(self) -> None:
        while self._unsaved:
            first = self._unsaved[0]
            path = self._recording.folder / first.name
            try:
                with open(path, "wb") as file:
                    os.fchmod(file.fileno(), 0o600)
                    for part in frame(first.event):
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                self._note_full_disk(error)
                return
            del self._unsaved[0]
            self._add(Stored(rank=first.event.rank, time=first.event.time, name=first.name))

    def _add(self, event: Event) -> None:
        if (
            self._is_disk_full
            and len(self._waiting) > _MAX_WAITING
            and not isinstance(event, (Phase, Stored))
        ):
            self._num_dropped += len(event.texts) if isinstance(event, Lines) else 0
            return
        event = _strip(event)
        if isinstance(event, (Phase, Stored)):
            self._standing[type(event).__name__, event.rank] = event
        self._added = time.monotonic()
        for part in frame(event):
            self._waiting += part

    def _flush_changing(self) -> None:
        self._drawn = time.monotonic()
        for event in self._changing.values():
            self._add(event)
        self._changing.clear()

    def _send(self) -> None:
        if not self._send_waiting():
            return
        self._save()
        if self._num_dropped:
            text = f"{self._num_dropped:,} lines are lost here: the disk was full"
            self._num_dropped = 0
            self._add(Notice(rank=-1, time=time.time(), text=text))
        limit = FIRST_BYTES if self._segment == 0 else _SEGMENT_BYTES
        if self._send_waiting() and self._size >= limit:
            self._begin_segment()

    def _send_waiting(self) -> bool:
        """Write what waits; return whether all of it is written."""
        try:
            while self._waiting:
                written = os.write(self._file, self._waiting[:_READ_BYTES])
                del self._waiting[:written]
                self._size += written
                self._is_dirty, self._is_disk_full = True, False
        except OSError as error:
            self._note_full_disk(error)
        return not self._waiting

    def _begin_segment(self) -> None:
        self._sync()
        self._segment += 1
        try:
            file = self._open()
        except OSError as error:  # no room for its name: this one goes on
            self._segment -= 1
            self._note_full_disk(error)
            return
        os.close(self._file)
        self._file, self._size = file, 0
        standing = Snapshot(rank=-1, time=time.time(), events=tuple(self._standing.values()))
        for part in frame(standing):
            self._waiting += part
        removed = self._segment - LAST_BYTES // _SEGMENT_BYTES
        if removed > 0:
            with contextlib.suppress(OSError):
                self._recording.find(self._start, removed).unlink()

    def _note_full_disk(self, error: OSError) -> None:
        if not self._is_disk_full:
            with contextlib.suppress(OSError):  # it goes to the same disk
                print(f"what the run says cannot be written: {error}", file=sys.stderr, flush=True)
        self._is_disk_full = True

    def _sync(self) -> None:
        with contextlib.suppress(OSError):  # told where it is written
            os.fsync(self._file)
        self._synced, self._is_dirty = time.monotonic(), False


def _strip(event: Event) -> Event:
    """Return an event without what says nothing elsewhere: clock and processes of this machine."""
    if isinstance(event, Pulse):
        return replace(event, moment=None)
    if isinstance(event, Failure):
        return replace(event, moment=None, alive=None)
    return replace(event, pid=None) if isinstance(event, Phase) else event


def _find_key(event: Event) -> tuple[object, ...] | None:
    """Return what an event is the state of; None where it is no state that the next one replaces."""
    if isinstance(event, Pulse):
        return ("pulse", event.rank)
    if isinstance(event, Progress):
        return ("bar", event.rank, event.bar)
    if isinstance(event, (Lines, Unfinished)):
        return ("row", event.rank, event.stream)
    return None


@dataclass(kw_only=True, slots=True)
class Reader:
    """Reads the events of a run, while they are written, perhaps on another machine.

    Attributes:
        recording: where they are.
    """

    recording: Recording
    _place: tuple[int, int] = (-1, 0)
    _position: int = 0
    _is_after_gap: bool = False
    _frames: FrameReader = field(default_factory=FrameReader)

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""
        return self._place[0] >= 0

    def read_events(self) -> list[Event]:
        """Return the next events, none where there are no new ones; of all starts, one after the other.

        Raises:
            FrameError: what was written is damaged.
            LaunchError: a file with what a rank returned or raised cannot be read.
        """
        while True:
            following = self.recording.find_next(*self._place)  # before: all of this one is there then
            if data := self._read_bytes():
                if events := self._frames.feed(data):
                    return [each for event in events for each in self._resolve(event)]
            elif following is None:
                return []
            else:
                (start, segment), (last_start, last_segment) = following, self._place
                expected = last_segment + 1 if start == last_start else 0
                is_removed = self.has_begun and not self.recording.find(*self._place).exists()
                self._is_after_gap = segment > expected or is_removed
                self._place, self._position, self._frames = following, 0, FrameReader()

    def _resolve(self, event: Event) -> list[Event]:
        if isinstance(event, Snapshot):
            if not self._is_after_gap:
                return []
            text = (
                f"a part of what the run said is left out here: its first {FIRST_BYTES >> 20} MB and its last "
                f"{LAST_BYTES >> 20} MB are kept"
            )
            notice = Notice(rank=-1, time=event.time, text=text)
            return [notice, *(each for standing in event.events for each in self._resolve(standing))]
        return [self._load(event.name)] if isinstance(event, Stored) else [event]

    def _load(self, name: str) -> Event:
        path = self.recording.folder / name
        try:
            (event,) = FrameReader().feed(path.read_bytes())
        except (OSError, ValueError) as error:
            raise LaunchError(f"{path} cannot be read: {error}") from error
        return event

    def _read_bytes(self) -> bytes:
        try:
            # opened anew: a file of another machine shows what is new only then
            with open(self.recording.find(*self._place), "rb", buffering=0) as file:
                file.seek(self._position)
                data: Any = file.read(_READ_BYTES)
        except FileNotFoundError:
            return b""
        self._position += len(data)
        return bytes(data)
