"""What is kept of a run's events within a bound of memory: measures, and containers that forget the oldest."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from ..events import Event, Line, Lines, Progress
from .lines import split_lines

_LINE_BYTES: Final = 128  # of a line's objects without its text, and of its place
_BAR_BYTES: Final = 288  # likewise
_MAX_PACK: Final = 256  # lines: so many may be forgotten at once
_LINES_BYTES: Final = 224  # likewise of lines that are kept together
_TEXT_BYTES: Final = 8  # of a text's place
_MAX_TRIES: Final = 100  # to read between two steps of who writes, which a fork may have ended for good
_PLACE_BYTES: Final = 16  # of an object in a container, and what the allocator adds to it
_ENTRY_BYTES: Final = 240  # of two entries in dicts, and of their key

E = TypeVar("E", bound=Event)
K = TypeVar("K", bound=tuple[object, ...])


def measure(event: Event) -> int:
    """Return how much memory an event takes, with all that it holds.

    Args:
        event: of any kind.
    """
    if isinstance(event, Line):
        return _LINE_BYTES + sys.getsizeof(event.text)
    if isinstance(event, Lines):
        return _LINES_BYTES + _TEXT_BYTES * len(event.texts) + sum(map(sys.getsizeof, event.texts))
    if isinstance(event, Progress):
        return _BAR_BYTES + sys.getsizeof(event.text) + sys.getsizeof(event.description)
    return _measure_all(event)


def _measure_all(value: object) -> int:
    """Return the memory of an object and of the values that it holds; each counts once."""
    size, open_values, known = 0, [value], set[int]()
    while open_values:
        item: Any = open_values.pop()
        if item is None or id(item) in known:
            continue
        known.add(id(item))
        size += sys.getsizeof(item) + _PLACE_BYTES
        if isinstance(item, dict):
            open_values += item.keys()
            open_values += item.values()
        elif isinstance(item, Event):
            open_values += [getattr(item, one.name) for one in dataclasses.fields(item)]
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            open_values += item
    return size


class NewestByKey(dict[K, E]):
    """The newest events by key, in the order in which the keys came. One thread changes it; others may copy it.

    Args:
        max_bytes: memory for them. The newest event is kept, whatever its size.
        max_count: how many are kept.
    """

    def __init__(self, max_bytes: int, max_count: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._sizes: dict[K, int] = {}
        self.num_bytes = 0

    def put(self, key: K, event: E) -> list[E]:
        """Add or replace an event, and return those that are forgotten for it."""
        size = measure(event) + _ENTRY_BYTES + sum(map(sys.getsizeof, key))
        self.num_bytes += size - self._sizes.get(key, 0)
        self._sizes[key], self[key] = size, event
        forgotten = []
        while len(self) > 1 and (len(self) > self._max_count or self.num_bytes > self._max_bytes):
            oldest = next(one for one in self if one != key)
            forgotten.append(self[oldest])
            self.remove(oldest)
        return forgotten

    def remove(self, key: K) -> None:
        """Remove an event where there is one."""
        if key in self._sizes:
            self.num_bytes -= self._sizes.pop(key)
            del self[key]

    def clear(self) -> None:
        """Remove all events."""
        super().clear()
        self._sizes.clear()
        self.num_bytes = 0


class History:
    """The newest events of a sequence, within a bound of memory. One thread adds events; others may read.

    Args:
        max_bytes: memory for them. The newest event is kept, whatever its size.
        max_count: how many of them are read; not many more are kept.
        max_pack: how many lines may be forgotten at once.

    Attributes:
        max_bytes: may change; the next event that is added brings it about.
    """

    def __init__(self, max_bytes: int, max_count: int = sys.maxsize, max_pack: int = _MAX_PACK) -> None:
        self.max_bytes = max_bytes
        self._max_count = max_count
        self._max_pack = max_pack
        self._kept: deque[Event] = deque()
        self._bytes = self._count = 0  # of what is kept
        self._end = self._num_added = 0  # they differ while events are being added

    @property
    def end(self) -> int:
        """How many events were added so far, of lines each; those that are being added come after it."""
        return self._num_added

    def add(self, event: Event) -> None:
        """Add an event, or lines.

        Args:
            event: the next one.
        """
        kept: Sequence[Event]
        if isinstance(event, Lines):
            kept, count = _pack(event, self._max_pack), len(event.texts)
            size = sum(map(measure, kept))
        else:
            kept, count, size = (event,), 1, measure(event)
        self._end += count
        try:
            self._kept.extend(kept)
            self._bytes += size
            self._count += count
            self._forget()
        finally:  # also where an interrupt comes: readers wait for it
            self._num_added = self._end

    def since(self, position: int) -> Iterator[Event]:
        """Return the events from a position on that are still kept, lines one by one.

        Args:
            position: an earlier value of `end`, or 0.
        """
        kept, end = self._snapshot()
        position = max(position, end - self._max_count)
        start, first = len(kept), end
        while start and first > position:
            start -= 1
            first -= _count(kept[start])
        return _expand(kept[start:], max(0, position - first))

    def texts(self, rank: int | None) -> Iterator[str]:
        """Return the texts of the lines that are still kept.

        Args:
            rank: of this rank only; None for all.
        """
        for each in self._snapshot()[0]:
            if isinstance(each, (Line, Lines)) and (rank is None or each.rank == rank):
                yield from each.texts if isinstance(each, Lines) else (each.text,)

    def _snapshot(self) -> tuple[list[Event], int]:
        """Return what is kept and the position after it, even if another thread adds events meanwhile."""
        for _ in range(_MAX_TRIES):
            before = self._num_added
            kept = list(self._kept)  # in one step: it runs no Python code
            if self._end == before:
                break
            time.sleep(0)  # lets the other thread end it
        return kept, before

    def _forget(self) -> None:
        """Forget the oldest events until the others have room."""
        kept = self._kept
        while self._bytes > self.max_bytes or self._count > self._max_count:
            count = _count(kept[0])
            if len(kept) == 1 or (self._bytes <= self.max_bytes and self._count - count < self._max_count):
                break
            size = measure(kept[0])
            kept.popleft()
            self._bytes -= size
            self._count -= count
        while self._bytes > self.max_bytes and isinstance(only := kept[0], Lines) and len(only.texts) > 1:
            kept[0] = rest = dataclasses.replace(only, texts=only.texts[-(len(only.texts) // 2) :])
            self._bytes, self._count = measure(rest), len(rest.texts)


class Beginning:
    """The first lines of a sequence, within a bound of memory. One thread adds lines; others may read.

    Attributes:
        is_full: whether nothing is kept any more of what is added.
    """

    __slots__ = ("_bytes", "_kept", "is_full")  # there is one for each of many ranks

    def __init__(self) -> None:
        self.is_full = False
        self._kept: list[Lines] = []
        self._bytes = 0

    def add(self, lines: Lines, max_bytes: int) -> None:
        """Add the next lines, as far as there is room.

        Args:
            lines: the next ones.
            max_bytes: memory for all that is kept.
        """
        room = max_bytes - self._bytes - _LINES_BYTES
        count = 0
        for text in lines.texts:
            room -= _TEXT_BYTES + sys.getsizeof(text)
            if room < 0:
                self.is_full = True
                break
            count += 1
        if count:
            kept = (
                lines if count == len(lines.texts) else dataclasses.replace(lines, texts=lines.texts[:count])
            )
            self._kept.append(kept)
            self._bytes = max_bytes - room

    def find_lines(self) -> list[Line]:
        """Return what is kept."""
        return [line for lines in list(self._kept) for line in split_lines(lines)]


def _pack(lines: Lines, most: int) -> list[Event]:
    """Return lines as they are kept: many in one object, where the collector would look at each again and again."""
    if len(lines.texts) == 1:
        return [*split_lines(lines)]  # it is smaller
    if len(lines.texts) <= most:
        return [lines]
    texts = [lines.texts[start : start + most] for start in range(0, len(lines.texts), most)]
    return [dataclasses.replace(lines, texts=each) for each in texts]


def _count(each: Event) -> int:
    return len(each.texts) if isinstance(each, Lines) else 1


def _expand(kept: Sequence[Event], skipped: int) -> Iterator[Event]:
    """Yield events one by one, but for the first ones."""
    for each in kept:
        events = split_lines(each) if isinstance(each, Lines) else [each]
        yield from events[skipped:] if skipped else events
        skipped = max(0, skipped - len(events))
