"""The events of a run that can be read again. Lines take the least of memory, and of Python's garbage collector."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..events import Event, Line, Stream
from .bounded import measure
from .lines import make_lines

_MAX_PACK: Final = 256  # lines: so many may be forgotten at once
_PACK_BYTES: Final = 224  # of a pack's own objects, and of its place
_TEXT_BYTES: Final = 8  # of a text's place
_MAX_TRIES: Final = 100  # to read between two steps of who writes, which a fork may have ended for good


@dataclass(frozen=True, kw_only=True, slots=True)
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
            self._kept[0] = rest = replace(only, texts=only.texts[-(len(only) // 2) :])
            self._bytes = rest.count_bytes()


def _count(each: Event | _Pack) -> int:
    return len(each) if isinstance(each, _Pack) else 1


def _expand(kept: Sequence[Event | _Pack], skipped: int) -> Iterator[Event]:
    """Yield events one by one, but for the first ones."""
    for each in kept:
        events = each.unpack() if isinstance(each, _Pack) else [each]
        yield from events[skipped:] if skipped else events
        skipped = max(0, skipped - len(events))
