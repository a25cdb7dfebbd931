"""What is kept of a run's events within a bound of memory: measures, and containers that forget the oldest."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, Generic, TypeVar

from ..events import Event, Line, Progress

_LINE_BYTES: Final = 128  # of a line's objects without its text, and of its place
_BAR_BYTES: Final = 288  # likewise
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
