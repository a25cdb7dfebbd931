"""What nodes that come and go tell each other while workers run, in the store of their round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

from ....trust.plain import MalformedError
from ...supervise.stop_agreement import Questions
from . import outcomes
from .node_store import AnyStore
from .outcomes import RestartCause

_LOOK_SECONDS: Final = 0.25  # between two looks into the store, each of which asks another machine
_STOP: Final = "stop"


class RoundNews:
    """The news of one round, from one set of workers to the next.

    Args:
        store: of the round.
        place: of this node in the round.
        num_nodes: how many are in the round.
        write: writes an entry: name, type, value.
        read: reads an entry: name, type; MalformedError where no node of the run wrote it.
        list_ended: returns the places of the nodes whose workers have ended well.
    """

    def __init__(
        self,
        store: AnyStore,
        place: int,
        num_nodes: int,
        write: Callable[[str, Any, Any], None],
        read: Callable[[str, Any], Any],
        list_ended: Callable[[], set[int]],
    ) -> None:
        self._store = store
        self._place = place
        self._places = range(num_nodes)
        self._write = write
        self._read = read
        self._list_ended = list_ended
        self._next_look = self._next_stop_look = 0.0
        self._stop: tuple[bool, Questions | None] = (False, None)
        self._sent = self._heard = 0.0
        self._has_asked = False
        self._own = {"news": 0, "ask": 0}
        self._seen = {"news": 0, "ask": 0}
        self._hangs: dict[int, str] = {}

    # -- a stop

    def share_stop(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        """Exchange how a stop stands; see `ShareStop`."""
        now = time.monotonic()
        if self._stop[1] is None and now >= self._next_stop_look:
            self._next_stop_look = now + _LOOK_SECONDS
            with contextlib.suppress(MalformedError):  # a stranger wrote it: the node that asks ends the wait
                self._stop = self._look_for_stop(asks, own)
        return self._stop

    def _look_for_stop(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        if asks:
            self._store.set(_STOP, "")
        elif not self._store.check([_STOP]):
            return False, None
        if own is None:
            return True, None
        self._write(f"held {self._place}", Questions, own)
        ended = self._list_ended()  # before the questions: a node that has ended writes none any more
        there = [place for place in self._places if self._store.check([f"held {place}"])]
        if set(self._places) - ended - set(there):
            return True, None
        held = [self._read(f"held {place}", Questions) for place in there]
        return True, Questions(min(each.least for each in held), max(each.most for each in held))

    # -- a restart

    def share_cause(self, cause: RestartCause) -> None:
        """Tell why the workers of this node start again."""
        self._write(f"cause {self._place}", RestartCause, cause)

    def find_cause(self) -> RestartCause | None:
        """Return why another node started its workers again, None where none told it.

        Each node tells it before it leaves the round: once all have met again, all of it is there.
        """
        causes: list[RestartCause] = []
        for place in self._places:
            if place != self._place and self._store.check([f"cause {place}"]):
                with contextlib.suppress(MalformedError):  # a stranger wrote it
                    causes.append(self._read(f"cause {place}", RestartCause))
        return outcomes.choose_cause(causes)

    # -- hangs

    def share_news(self, news: float, *, ask: bool, every: float) -> tuple[float, bool]:
        """Exchange whether anything was heard of ranks; see `NodeRendezvous.share_news`."""
        now = time.monotonic()
        if ask and not self._has_asked:
            self._count_up("ask")
        self._has_asked = ask
        if news > self._sent and now - self._sent > every:
            self._sent = now
            self._count_up("news")
        others_ask = False
        if now >= self._next_look:
            self._next_look = now + min(_LOOK_SECONDS, every)
            others_ask = self._has_more("ask")
            if self._has_more("news"):
                self._heard = now
        return self._heard, others_ask

    def _count_up(self, name: str) -> None:
        self._store.add(name, 1)
        self._own[name] += 1

    def _has_more(self, name: str) -> bool:
        """Return whether other nodes have counted up since the last call."""
        before, self._seen[name] = self._seen[name], self._store.add(name, 0) - self._own[name]
        return self._seen[name] > before

    def share_hang(self, report: str) -> bool:
        """Tell the report of a hang; return whether all nodes have told theirs.

        Args:
            report: of the ranks of this node.
        """
        if self._place not in self._hangs:
            self._hangs[self._place] = report
            self._write(f"hang {self._place}", str, report)
        missing = [place for place in self._places if place not in self._hangs]
        for place in missing:
            if self._store.check([f"hang {place}"]):
                self._hangs[place] = ""
                with contextlib.suppress(MalformedError):  # a stranger wrote it
                    self._hangs[place] = self._read(f"hang {place}", str)
        return set(self._places) - self._list_ended() <= self._hangs.keys()

    @property
    def hang(self) -> str:
        """What all nodes have told of a hang, empty where there is none."""
        return "\n".join(report for _, report in sorted(self._hangs.items()) if report)
