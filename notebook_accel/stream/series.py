"""The values of metrics: all of them while they are few, an even choice of them later."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

MAX_POINTS: Final = 10_000
MAX_NAMES: Final = 1_000
MOST_MEASURED: Final = 64
"""Of more ranks, the metrics of some are kept."""
_POINT_BYTES: Final = 176  # a point, its three numbers and its place in a list
_SERIES_BYTES: Final = 1_000  # a series with its extremes and its last value, and its places in two dicts


class Point(NamedTuple):
    """One value of a metric.

    Attributes:
        step: None if none was given.
        time: in seconds since the epoch.
        value: the value.
    """

    step: int | None
    time: float
    value: float


_Numbered = tuple[int, Point]


class Series:
    """The values of one metric, oldest first. One thread adds values; others may read.

    Up to `max_points` values are kept. When there are more, every second one is dropped, and from then on only every
    second new one is added; then every fourth, and so on. So the kept ones are spread evenly over the whole run, and
    metrics that are logged together keep the same steps. The smallest, the largest and the last value stay besides,
    and the first one that is not finite.

    Args:
        max_points: at least 1.
    """

    __slots__ = ("_even", "_high", "_last", "_low", "_max_points", "_odd", "_seen")

    def __init__(self, max_points: int) -> None:
        self._max_points = max_points
        self._seen = 0
        self._even: tuple[int, list[Point]] = (
            1,
            [],
        )  # every n-th value; one object, so that readers see both
        self._low: _Numbered | None = None  # these four have their numbers, from 0
        self._high: _Numbered | None = None
        self._odd: _Numbered | None = None
        self._last: _Numbered | None = None

    def add(self, point: Point) -> None:
        """Add the next value."""
        numbered = (self._seen, point)
        every, points = self._even
        if self._seen % every == 0:
            points.append(point)
        self._seen += 1
        self._last = numbered
        if math.isfinite(point.value):
            if self._low is None or point.value < self._low[1].value:
                self._low = numbered
            if self._high is None or point.value > self._high[1].value:
                self._high = numbered
        elif self._odd is None:
            self._odd = numbered
        if len(points) > self._max_points:
            self.thin()

    def thin(self) -> None:
        """Drop every second one of the values that are spread evenly; the first one stays."""
        every, points = self._even
        self._even = (2 * every, points[::2])

    @property
    def num_counted(self) -> int:
        """How many values are kept besides the smallest, the largest and the last one, which every series has."""
        return len(self._even[1]) + (self._odd is not None)

    def _list(self) -> list[Point]:
        every, points = self._even
        points = points[:]
        chosen = (self._low, self._high, self._odd, self._last)
        others = {numbered for numbered in chosen if numbered is not None}
        for number, point in sorted(others, key=lambda numbered: -numbered[0]):
            if number % every:
                points.insert(number // every + 1, point)
        return points

    def __iter__(self) -> Iterator[Point]:
        return iter(self._list())

    def __len__(self) -> int:
        return len(self._list())

    def __getitem__(self, index: int) -> Point:
        return self._list()[index]


class Metrics(Generic[KeyT]):
    """The series of a run by name, or by rank and name, within a bound of memory.

    Where all series together are too large, the longer ones are thinned. There are at most `max_names` series: beyond
    that, the shortest one is forgotten, of several the one with the oldest news; where a forgotten one comes back,
    the one with the newest, or each name would be forgotten just before it comes again.

    Args:
        max_bytes: memory for all of them.
        max_points: values that are kept of each.
        max_names: how many series are kept.
    """

    def __init__(self, max_bytes: int, max_points: int, max_names: int = MAX_NAMES) -> None:
        self._max_bytes = max_bytes
        self._max_points = max_points
        self._max_names = max_names
        self._series: dict[KeyT, Series] = {}
        self._by_news: OrderedDict[KeyT, None] = OrderedDict()  # names, the one with the newest value last
        self._forgotten: OrderedDict[int, None] = OrderedDict()  # hashes of as many names, the newest last
        self._fixed_bytes = 0
        self._num_points = 0

    @property
    def series(self) -> Mapping[KeyT, Series]:
        """The series in the order in which they began."""
        return self._series

    @property
    def num_bytes(self) -> int:
        """The memory of all series, by estimate."""
        return self._fixed_bytes + _POINT_BYTES * self._num_points

    def add(self, name: KeyT, point: Point) -> None:
        """Add the next value of a metric."""
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = Series(self._max_points)
            self._fixed_bytes += _SERIES_BYTES + _measure(name)
            self._by_news[name] = None
        else:
            self._by_news.move_to_end(name)
        before = series.num_counted
        series.add(point)
        self._num_points += series.num_counted - before
        while len(self._series) > self._max_names:
            self._forget_one(but=name, newest=hash(name) in self._forgotten)
        if self.num_bytes > self._max_bytes:
            self._shrink()

    def _shrink(self) -> None:
        """Thin the series that have more than half of their share; where names alone take too much, forget some."""
        half = self._num_points / len(self._series) / 2
        for series in self._series.values():
            before = series.num_counted
            if before > max(half, 1):
                series.thin()
                self._num_points += series.num_counted - before
        while self.num_bytes > self._max_bytes and len(self._series) > 1:
            self._forget_one()

    def _forget_one(self, but: KeyT | None = None, *, newest: bool = False) -> None:
        """Forget one of the shortest series; of several the one with the oldest news, or with the newest."""
        by_news = reversed(self._by_news) if newest else iter(self._by_news)
        name = min((one for one in by_news if one != but), key=lambda one: self._series[one].num_counted)
        del self._by_news[name]
        self._forgotten[hash(name)] = None
        self._forgotten.move_to_end(hash(name))
        if len(self._forgotten) > self._max_names:
            self._forgotten.popitem(last=False)
        series = self._series.pop(name)
        self._fixed_bytes -= _SERIES_BYTES + _measure(name)
        self._num_points -= series.num_counted


def _measure(name: Hashable) -> int:
    """Return the bytes of a name, or of a rank and a name."""
    parts = name if isinstance(name, tuple) else ()
    return sys.getsizeof(name) + sum(map(sys.getsizeof, parts))
