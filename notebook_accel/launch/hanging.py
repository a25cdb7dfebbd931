"""In the notebook: notices that a run does nothing any more, and asks each rank where it is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from ..events import Event, Held, Notice, Order, Where, WhereOrder
from . import hang

_ANSWER_SECONDS: Final = 1.5
_START_SECONDS: Final = 60.0  # a process that starts imports much, without a word
_DEAF_SECONDS: Final = 1.0  # in which stacks arrive as lines of the ranks that could not answer
STACK_SIGNAL: Final[int | None] = getattr(signal, "SIGRTMIN", 0) + 7 if hasattr(signal, "SIGRTMIN") else None
"""Makes a worker write its stack to stderr, also where C code holds the interpreter; programs use lower ones."""


class HangWatch:
    """Tells, once for each time that it comes to it, that nothing has been heard of any rank for a while.

    Whatever a rank does that the notebook hears of is progress: a step, a batch, a line, a bar, a metric, a display, a
    collective that is entered or left.

    Args:
        timeout: seconds without anything, None for never.
        tell: sends an order.
        deliver: takes what is to be shown.
        send: sends a signal to the process of a rank.
    """

    def __init__(
        self,
        timeout: float | None,
        tell: Callable[[Order], None],
        deliver: Callable[[Sequence[Event]], None],
        send: Callable[[int, int], object],
    ) -> None:
        self._timeout = timeout
        self._tell = tell
        self._deliver = deliver
        self._send = send
        self._own_news = self._news = time.monotonic()
        self._asked: float | None = None
        self._told = False
        self._deaf_until = 0.0
        self._wheres: dict[int, Where] = {}
        self._is_called = False

    @property
    def news(self) -> float:
        """When something was heard last of ranks here, by the monotonic clock."""
        return self._own_news

    @property
    def has_asked(self) -> bool:
        """Whether ranks were asked where they are since something was heard last."""
        return self._asked is not None

    @property
    def is_asking(self) -> bool:
        """Whether ranks are asked where they are, or are to be, and nothing was told yet."""
        return (self._asked is not None or self._is_called) and not self._told

    def hear_others(self, news: float, *, ask: bool) -> None:
        """Take from other nodes of the run when something was heard of ranks there, and that they ask theirs now."""
        if self._timeout is not None and news > self._news and time.monotonic() - news < self._timeout:
            self._news = news
            self._begin_anew()
        self._is_called = self._is_called or ask

    def take(self, events: Sequence[Event]) -> None:
        """Take what came from the ranks."""
        for event in events:
            if isinstance(event, Where):
                self._wheres[event.rank] = event
            elif not isinstance(event, Held):
                self._hear()

    def _hear(self) -> None:
        now = time.monotonic()
        if now >= self._deaf_until:
            self._own_news = self._news = now
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._asked, self._told, self._is_called = None, False, False

    def look(self, running: Mapping[int, int], started: Collection[int], ended: Collection[int]) -> str:
        """Return what was told just now, empty where nothing was; comes several times a second.

        Args:
            running: process ids by rank.
            started: ranks whose process is ready to be asked.
            ended: ranks that have returned.
        """
        if self._timeout is None or self._told:
            return ""
        now = time.monotonic()
        if self._asked is None:
            patience = self._timeout
            if not running.keys() <= set(started):
                patience = max(patience, _START_SECONDS)
            if now - self._news >= patience or self._is_called:
                self._asked, self._is_called = now, False
                self._wheres.clear()
                for rank in running.keys() & started:
                    self._tell(WhereOrder(rank=rank, time=time.time()))
            return ""
        silent = (running.keys() & started) - self._wheres.keys()
        if silent and now - self._asked < _ANSWER_SECONDS:
            return ""
        self._told = True
        self._deaf_until = now + _DEAF_SECONDS
        wheres = {rank: where for rank, where in self._wheres.items() if rank in running}
        text = hang.told(wheres, running, started, ended, now - self._news)
        self._deliver([Notice(rank=-1, time=time.time(), text=text)])
        if STACK_SIGNAL is not None:
            for rank in silent:
                self._send(rank, STACK_SIGNAL)
        return text
