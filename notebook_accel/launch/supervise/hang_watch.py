"""In the notebook: notices that ranks do nothing any more, and asks each where it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from ...events import Ended, Event, Held, Notice, Order, StackOrder, StackReport
from ..signals import STACK_SIGNAL
from . import hang_report

_ANSWER_SECONDS: Final = 5.0
_START_SECONDS: Final = 60.0  # a process that starts imports much, without a word
_DEAF_SECONDS: Final = 3.0  # in which stacks arrive as lines of the ranks that could not answer


class HangWatch:
    """Reports where each rank is, once per hang of a run or of a session's call.

    They hang when nothing was heard of any rank for a while. Everything that a rank does counts: a step, a batch, a
    line, a bar, a metric, a display, a collective that is entered or left.

    Args:
        timeout: seconds after which it is reported; None for never.
        tell: sends an order to a rank.
        deliver: takes the report.
        send_signal: sends a signal to the process of a rank.
        find_state: says why the process of a rank cannot go on, as `hang_report.find_process_state` does.
        find_node: says the host or node of a rank, where that needs a word.
    """

    def __init__(
        self,
        timeout: float | None,
        tell: Callable[[Order], None],
        deliver: Callable[[Sequence[Event]], None],
        send_signal: Callable[[int, int], object],
        find_state: Callable[[int], str],
        find_node: Callable[[int], str],
    ) -> None:
        self._timeout = timeout
        self._tell = tell
        self._deliver = deliver
        self._send_signal = send_signal
        self._find_state = find_state
        self._find_node = find_node
        self._own_news = self._news = time.monotonic()
        self._asked_at: float | None = None
        self._is_reported = False
        self._deaf_until = 0.0
        self._stacks: dict[int, StackReport] = {}
        self._others_ask = False

    @property
    def news(self) -> float:
        """When something was heard last of ranks of this node, by the monotonic clock."""
        return self._own_news

    @property
    def has_asked(self) -> bool:
        """Whether the ranks were asked where they are since something was heard last."""
        return self._asked_at is not None

    @property
    def is_asking(self) -> bool:
        """Whether the ranks are being asked where they are, or will be, and nothing is reported yet."""
        return (self._asked_at is not None or self._others_ask) and not self._is_reported

    def hear_others(self, news: float, *, ask: bool) -> None:
        """Take what other nodes of the run say of their ranks.

        Args:
            news: when something was heard last of ranks of other nodes, by the monotonic clock.
            ask: whether another node asks its ranks where they are.
        """
        if self._timeout is not None and news > self._news and time.monotonic() - news < self._timeout:
            self._news = news
            self._begin_anew()
        self._others_ask = self._others_ask or ask

    def take(self, events: Sequence[Event]) -> None:
        """Take what came from the ranks of this node."""
        heard = False
        for event in events:
            if isinstance(event, StackReport):
                self._stacks[event.rank] = event
            elif not isinstance(event, (Held, Ended)):
                heard = True
        if heard and time.monotonic() >= self._deaf_until:
            self.begin()

    def _begin_anew(self) -> None:
        self._asked_at, self._is_reported, self._others_ask = None, False, False

    def begin(self) -> None:
        """Count from now: something was heard, or a call of a session begins."""
        self._own_news = self._news = time.monotonic()
        self._begin_anew()

    def look(
        self,
        running: Mapping[int, int],
        ready: Collection[int],
        returned: Collection[int],
        absent: Collection[int] = (),
    ) -> str:
        """Ask the ranks, or report, where that is due; comes several times a second.

        Args:
            running: process ids by rank, of ranks that have not ended.
            ready: ranks whose process can be asked.
            returned: ranks that have returned.
            absent: ranks that take no part in the call of a session.

        Returns:
            The report of a hang at the look that reports it, else empty.
        """
        if self._timeout is None or self._is_reported:
            return ""
        now = time.monotonic()
        asked = running.keys() & ready
        if self._asked_at is None:
            patience = self._timeout
            if asked != running.keys():
                patience = max(patience, _START_SECONDS)
            if now - self._news >= patience or self._others_ask:
                self._others_ask = False
                self._ask(asked)
            return ""
        if asked - self._stacks.keys() and now - self._asked_at < _ANSWER_SECONDS:
            return ""
        stacks = {rank: stack for rank, stack in self._stacks.items() if rank in running}
        states = {rank: state for rank in running.keys() - stacks.keys() if (state := self._find_state(rank))}
        nodes = {rank: node for rank in running if (node := self._find_node(rank))}
        self._is_reported = True
        self._deaf_until = now + _DEAF_SECONDS
        text = hang_report.describe_hang(
            stacks, running, ready, returned, absent, now - self._news, states, nodes
        )
        self._deliver([Notice(rank=-1, time=time.time(), text=text)])
        if STACK_SIGNAL is not None:
            for rank in asked - stacks.keys() - states.keys():
                self._send_signal(rank, STACK_SIGNAL)
        return text

    def _ask(self, ranks: Collection[int]) -> None:
        self._asked_at = time.monotonic()
        self._stacks.clear()
        for rank in ranks:
            self._tell(StackOrder(rank=rank, time=time.time()))
