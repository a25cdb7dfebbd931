"""What is kept of a run's events within a bound of memory: measures, and containers that forget the oldest."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from ..events import Event, Line, Progress, Stream
from .lines import make_lines

_LINE_BYTES: Final = 128  # of a line's objects without its text, and of its place
_BAR_BYTES: Final = 288  # likewise
_MAX_PACK: Final = 256  # lines: so many may be forgotten at once
_PACK_BYTES: Final = 224  # of a pack of lines without their texts, and of its place
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
    if isinstance(event, Line):  # by far the most frequent one
        return _LINE_BYTES + sys.getsizeof(event.text)
    if isinstance(event, Progress):
        return _BAR_BYTES + sys.getsizeof(event.text) + sys.getsizeof(event.description)
    return _measure_all(event)


def measure_lines(lines: Sequence[Line]) -> int:
    """Return how much memory lines take.

    Args:
        lines: any number.
    """
    return _LINE_BYTES * len(lines) + sum(map(sys.getsizeof, [line.text for line in lines]))


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


class Newest(Generic[E]):
    """The newest events of a sequence. One thread adds events; others may iterate.

    Args:
        max_bytes: memory for them. The newest event is kept, whatever its size.
        max_count: how many are kept.

    Attributes:
        max_bytes: may change; the next event that is added brings it about.
    """

    def __init__(self, max_bytes: int, max_count: float = math.inf) -> None:
        self.max_bytes = max_bytes
        self._max_count = max_count
        self._events: deque[E] = deque()
        self._bytes = 0

    def extend(self, new: Sequence[E], size: int) -> None:
        """Add events.

        Args:
            new: the next ones.
            size: the sum of what `measure` says of them.
        """
        events, count = self._events, self._max_count
        events.extend(new)
        held = self._bytes + size
        while (held > self.max_bytes or len(events) > count) and len(events) > 1:
            held -= measure(events.popleft())
        self._bytes = held

    def __iter__(self) -> Iterator[E]:
        return iter(list(self._events))  # in one step: it runs no Python code

    def __len__(self) -> int:
        return len(self._events)


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Pack:
    """Lines of one rank that came together: one object, where the collector would look at each line again and again."""

    rank: int
    time: float
    stream: Stream
    texts: tuple[str, ...]

    def unpack(self) -> list[Line]:
        return make_lines(self.rank, self.time, self.stream, self.texts)

    def count_bytes(self) -> int:
        return _PACK_BYTES + _TEXT_BYTES * len(self.texts) + sum(map(sys.getsizeof, self.texts))

    def __len__(self) -> int:
        return len(self.texts)


class History:
    """The newest events of a sequence, within a bound of memory. One thread adds events; others may read.

    Args:
        max_bytes: memory for them. The newest event is kept, whatever its size.

    Attributes:
        max_bytes: may change; the next event that is added brings it about.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: deque[Event | _Pack] = deque()
        self._bytes = 0
        self._end = self._num_added = 0  # they differ while events are being added

    @property
    def end(self) -> int:
        """How many events were added so far; those that are being added come after it."""
        return self._num_added

    def add(self, event: Event) -> None:
        """Add an event.

        Args:
            event: the next one.
        """
        self._keep([event], measure(event), 1)

    def add_lines(self, lines: Sequence[Line]) -> None:
        """Add lines that are alike but for their texts.

        Args:
            lines: the next ones, at least one.
        """
        if len(lines) == 1:
            self.add(lines[0])
            return
        first, packs = lines[0], list[_Pack]()
        for start in range(0, len(lines), _MAX_PACK):
            texts = tuple([line.text for line in lines[start : start + _MAX_PACK]])
            packs.append(_Pack(rank=first.rank, time=first.time, stream=first.stream, texts=texts))
        self._keep(packs, sum(pack.count_bytes() for pack in packs), len(lines))

    def since(self, position: int) -> Iterator[Event]:
        """Return the events from a position on that are still kept.

        Args:
            position: an earlier value of `end`, or 0.
        """
        kept, end = self._snapshot()
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
            if isinstance(each, (Line, _Pack)) and (rank is None or each.rank == rank):
                yield from each.texts if isinstance(each, _Pack) else (each.text,)

    def _keep(self, new: Sequence[Event | _Pack], size: int, count: int) -> None:
        self._end += count
        try:
            self._kept.extend(new)
            self._bytes += size
            self._forget()
        finally:  # also where an interrupt comes: readers wait for it
            self._num_added = self._end

    def _snapshot(self) -> tuple[list[Event | _Pack], int]:
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
        while self._bytes > self.max_bytes and len(self._kept) > 1:
            oldest = self._kept.popleft()
            self._bytes -= oldest.count_bytes() if isinstance(oldest, _Pack) else measure(oldest)
        while self._bytes > self.max_bytes and isinstance(only := self._kept[0], _Pack) and len(only) > 1:
            self._kept[0] = rest = dataclasses.replace(only, texts=only.texts[-(len(only) // 2) :])
            self._bytes = rest.count_bytes()


def _count(each: Event | _Pack) -> int:
    return len(each) if isinstance(each, _Pack) else 1


def _expand(kept: Sequence[Event | _Pack], skipped: int) -> Iterator[Event]:
    """Yield events one by one, but for the first ones."""
    for each in kept:
        events = each.unpack() if isinstance(each, _Pack) else [each]
        yield from events[skipped:] if skipped else events
        skipped = max(0, skipped - len(events))
