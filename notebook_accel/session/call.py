"""In the notebook: one call of a session, from its orders to the end on every rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ..events import (
    CallEnd,
    Event,
    Failure,
    Held,
    HoldOrder,
    InterruptOrder,
    Order,
    ReleaseOrder,
    Result,
    StopOrder,
    Where,
    WhereOrder,
)
from ..launch import hang
from ..stream.sinks import Sink

_INTERRUPT_SECONDS: Final = 0.3  # from the interrupt to the end of connections: Python code needs no more
_RELEASE_SECONDS: Final = 5.0
_ANSWER_SECONDS: Final = 1.0
_LOOKS: Final = 4  # in each hang_timeout


@dataclass(kw_only=True)
class Call:
    """What is known of a call; `take` and the lists that it fills are the reader's, the rest the caller's.

    Attributes:
        number: counted from 1; answers to earlier calls are told by it.
        name: for messages.
        ranks: that take part; `world` are all of the session.
        pids: of all ranks.
        tell: sends an order.
        kill: ends a worker that does not come back.
        told: ranks that had to be interrupted; `was_released` says that connections between ranks had to be ended.
        was_interrupted: somebody asked for the end, and it took an interrupt.
        owner: the thread that makes the call; `begun` is when, in seconds since the epoch.
        grace: seconds that ranks have to end after one has failed.
        hang_timeout: seconds after which a wait for absent ranks is told, None for never.
    """

    number: int
    name: str
    ranks: frozenset[int]
    pids: dict[int, int]
    tell: Callable[[Order], None]
    kill: Callable[[int], None]
    grace: float = 1.0
    hang_timeout: float | None = None
    results: dict[int, Result] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    positions: dict[int, Mapping[str, int] | None] = field(default_factory=dict)
    waiting: deque[Event] = field(default_factory=deque)
    told: set[int] = field(default_factory=set)
    was_interrupted: bool = False
    was_released: bool = False
    owner: int = field(default_factory=threading.get_ident)
    begun: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self._stage = 0
        self._next = float("inf")
        self._next_look = self.started
        self._wheres: dict[int, Where] = {}
        self._reported: set[tuple[tuple[int, str], ...]] = set()
        self._held: dict[int, int] = {}
        self._stop_until: float | None = None
        self._held_since: float | None = None
        self._stop_told = False

    @property
    def left(self) -> frozenset[int]:
        """The ranks that have not ended the call."""
        return self.ranks - self.results.keys() - self.failures.keys()

    @property
    def seconds(self) -> float:
        """How long it has been going on."""
        return time.monotonic() - self.started

    def take(self, event: Event) -> None:
        """Take an event of a worker, in the thread that reads them."""
        if isinstance(event, CallEnd):
            if event.call != self.number:
                return
            if isinstance(event.outcome, Result):
                self.results[event.rank] = event.outcome
            else:
                self.failures[event.rank] = event.outcome
            self.positions[event.rank] = event.positions
        elif isinstance(event, Failure):
            if event.rank in self.ranks:
                self.failures.setdefault(event.rank, event)
            self.positions[event.rank] = None
        elif isinstance(event, Held):
            self._held[event.rank] = event.questions
        elif isinstance(event, Where):
            if event.call == self.number:
                self._wheres[event.rank] = event
        else:
            self.waiting.append(event)

    def advance(self, sink: Sink) -> None:
        """Do what is due now; the caller comes several times a second."""
        now = time.monotonic()
        if self._stage == 0 and self.failures and self.left:
            self.bring_back(self.grace)
        if self._stop_until is not None:
            self._agree_on_stop(now)
        if self._stage > 0:
            self._press(now)
        elif self.hang_timeout is not None:
            self._look_for_waits(now, self.hang_timeout, sink)

    def bring_back(self, grace: float) -> None:
        """Have the ranks that have not ended come back: by themselves within `grace` seconds, or by force."""
        due = time.monotonic() + grace
        self._next = min(self._next, due) if self._stage == 1 else due
        self._stage = max(self._stage, 1)

    def stop(self, grace: float) -> None:
        """Let ranks that ask whether to stop do so at the same question, within `grace` seconds; interrupt others."""
        self._stop_until = time.monotonic() + grace

    def _press(self, now: float) -> None:
        """Ask the ranks that are left to come back, each time more firmly."""
        if now < self._next:
            return
        left = self.left
        stamp = time.time()
        self.told |= left
        if self._stage == 1:
            for rank in left:
                self.tell(InterruptOrder(rank=rank, time=stamp, call=self.number))
            self._stage, self._next = 2, now + _INTERRUPT_SECONDS
        elif self._stage == 2:
            self.was_released = True
            pids = list(self.pids.values())
            for rank in left:
                self.tell(ReleaseOrder(rank=rank, time=stamp, call=self.number, pids=pids))
            self._stage, self._next = 3, now + _RELEASE_SECONDS
        else:
            for rank in left:
                self.kill(rank)
            self._next = float("inf")

    def _agree_on_stop(self, now: float) -> None:
        stamp = time.time()
        if self._held_since is None:
            self._held_since = now
            for rank in self.left:
                self.tell(HoldOrder(rank=rank, time=stamp))
        if not self._stop_told and self.left <= self._held.keys():
            self._stop_told = True
            last = max(self._held.values(), default=0) + 1
            for rank in self.left:
                self.tell(StopOrder(rank=rank, time=stamp, question=last))
        assert self._stop_until is not None
        asks = self._stop_told and all(self._held.get(rank, 0) for rank in self.left)
        silent = now - self._held_since > _ANSWER_SECONDS
        if now > self._stop_until or (self._stop_told and not asks) or (not self._stop_told and silent):
            self._stop_until = None
            self.was_interrupted = True
            self.bring_back(0.0)

    def _look_for_waits(self, now: float, timeout: float, sink: Sink) -> None:
        if now < self._next_look:
            return
        wheres = {rank: where for rank, where in self._wheres.items() if rank in self.left}
        if wheres.keys() == self.left and (text := self._sentence(wheres, timeout)):
            state = tuple((rank, wheres[rank].collective) for rank in sorted(wheres))
            if state not in self._reported:
                self._reported.add(state)
                sink.note(text)
        self._wheres = {}
        self._next_look = now + min(timeout / _LOOKS, 15.0)
        for rank in self.left:
            self.tell(WhereOrder(rank=rank, time=time.time(), call=self.number))

    def _sentence(self, wheres: Mapping[int, Where], timeout: float) -> str:
        return hang.sentence(wheres, self.ranks - self.left, self.pids.keys() - self.ranks, timeout)
