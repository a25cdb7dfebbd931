"""In the notebook: one call of a session, from its orders to its end on every rank."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..events import (
    CallEnd,
    Event,
    Failure,
    Held,
    HoldOrder,
    InterruptOrder,
    Lines,
    Order,
    ReleaseOrder,
    Result,
    StackOrder,
    StackReport,
    StopOrder,
    Unfinished,
)
from ..launch.durations import Start
from ..launch.supervise import hang_report
from ..stream.sinks import Sink

_INTERRUPT_SECONDS: Final = 0.3  # from the interrupt to the end of connections; enough for Python code
_RELEASE_SECONDS: Final = 15.0  # a rank that is killed takes the session's state along
_ANSWER_SECONDS: Final = 10.0  # whose function never asks says so at once
_LAST_STAGE: Final = 3  # 1: to be interrupted, 2: to be released, 3: to be killed
_LOOKS: Final = 4  # in each hang_timeout


@dataclass(kw_only=True)
class Call:
    """The state of one call.

    The thread that reads events calls `take` and fills the collections; the rest belongs to the thread of the caller.

    Attributes:
        number: counted from 1; answers to earlier calls have another number.
        name: for messages.
        ranks: that take part.
        pids: process ids of all ranks of the session, also of those that take no part.
        tell: sends an order.
        kill: ends a worker that does not come back.
        addresses: of the machines that the ranks are on; empty where they are all on this one.
        grace: seconds that ranks have to end after one has failed.
        hang_timeout: seconds after which a wait for absent ranks is reported, None for never.
        results: of ranks that have returned.
        failures: of ranks that have raised or died.
        positions: the number of collectives in each process group at a rank's end; None for a rank that died
            or has left its group.
        waiting: events to be shown.
        num_waiting: how many they are; lines count one by one.
        interrupted: ranks that had to be interrupted.
        was_interrupted: True if somebody asked for the end and ranks had to be interrupted for it.
        was_released: True if connections between ranks had to be closed.
        owner: the thread that makes the call.
        start: when it started.
    """

    number: int
    name: str
    ranks: frozenset[int]
    pids: dict[int, int]
    tell: Callable[[Order], None]
    kill: Callable[[int], None]
    addresses: Sequence[str] = ()
    grace: float = 1.0
    hang_timeout: float | None = None
    results: dict[int, Result] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    positions: dict[int, Mapping[str, int] | None] = field(default_factory=dict)
    waiting: deque[Event] = field(default_factory=deque)
    num_waiting: int = 0
    interrupted: set[int] = field(default_factory=set)
    was_interrupted: bool = False
    was_released: bool = False
    owner: int = field(default_factory=threading.get_ident)
    start: Start = field(default_factory=Start)

    def __post_init__(self) -> None:
        self._stage = 0
        self._next = float("inf")
        self._next_look = self.start.moment
        self._stacks: dict[int, StackReport] = {}
        self._silent: frozenset[int] = frozenset()
        self._reported: set[tuple[tuple[int, str], ...]] = set()
        self._held: dict[int, int] = {}
        self._stop_until: float | None = None
        self._held_since: float | None = None
        self._stop_is_sent = False

    @property
    def unfinished(self) -> frozenset[int]:
        """The ranks that have not ended the call."""
        return self.ranks - self.results.keys() - self.failures.keys()

    @property
    def seconds(self) -> float:
        """The seconds since its start."""
        return self.start.seconds

    def take(self, event: Event) -> None:
        """Take an event of a worker, in the thread that reads them.

        Args:
            event: of any kind; those to be shown go to `waiting`.
        """
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
        elif isinstance(event, StackReport):
            if event.call == self.number:
                self._stacks[event.rank] = event
        else:
            self.waiting.append(event)
            self.num_waiting += len(event.texts) if isinstance(event, Lines) else 1

    def advance(self, sink: Sink) -> None:
        """Do what is due now. The caller's thread calls this several times a second.

        Args:
            sink: shows reports of waits.
        """
        now = time.monotonic()
        if self._stage == 0 and self.failures and self.unfinished:
            self.bring_back(self.grace)
        if self._stop_until is not None:
            self._agree_on_stop(now)
        if self._stage > 0:
            self._escalate(now)
        elif self.hang_timeout is not None:
            self._look_for_waits(now, self.hang_timeout, sink)

    def bring_back(self, grace: float) -> None:
        """End the call on the ranks that have not ended it.

        Args:
            grace: seconds that they have to end by themselves; then they are interrupted, released and killed in turn.
                Once the first of these has begun, each takes the time that it has.
        """
        if self._stage <= 1:
            self._stage, self._next = 1, min(self._next, time.monotonic() + grace)

    def kill_unfinished(self) -> None:
        """Kill the ranks that have not ended the call: whoever waits for them waits no longer."""
        self.interrupted |= self.unfinished
        for rank in self.unfinished:
            self.kill(rank)
        self._stage, self._next = _LAST_STAGE, float("inf")

    def stop(self, grace: float) -> None:
        """Stop the call: ranks that ask whether to stop do so at the same question, others are interrupted.

        Args:
            grace: seconds that ranks have for it.
        """
        self._stop_until = time.monotonic() + grace

    def _escalate(self, now: float) -> None:
        """Make unfinished ranks come back, each time by a stronger means."""
        if now < self._next:
            return
        unfinished = self.unfinished
        stamp = time.time()
        self.interrupted |= unfinished
        if self._stage == 1:
            for rank in unfinished:
                self.tell(InterruptOrder(rank=rank, time=stamp, call=self.number))
            self._stage, self._next = 2, now + _INTERRUPT_SECONDS
        elif self._stage == 2:
            self.was_released = True
            pids = list(self.pids.values())
            for rank in unfinished:
                self.tell(self._make_release(rank, stamp, pids))
            self._stage, self._next = _LAST_STAGE, now + _RELEASE_SECONDS
        else:
            self.kill_unfinished()

    def _make_release(self, rank: int, stamp: float, pids: Sequence[int]) -> ReleaseOrder:
        return ReleaseOrder(rank=rank, time=stamp, call=self.number, pids=pids, addresses=self.addresses)

    def _agree_on_stop(self, now: float) -> None:
        stamp = time.time()
        if self._held_since is None:
            self._held_since = now
            for rank in self.unfinished:
                self.tell(HoldOrder(rank=rank, time=stamp))
        if not self._stop_is_sent and self.unfinished <= self._held.keys():
            self._stop_is_sent = True
            last = max(self._held.values(), default=0) + 1
            for rank in self.unfinished:
                self.tell(StopOrder(rank=rank, time=stamp, question=last))
        assert self._stop_until is not None
        asks = self._stop_is_sent and all(self._held.get(rank, 0) for rank in self.unfinished)
        silent = now - self._held_since > _ANSWER_SECONDS
        if now > self._stop_until or (self._stop_is_sent and not asks) or (not self._stop_is_sent and silent):
            self._stop_until = None
            self.was_interrupted = True
            self.bring_back(0.0)

    def _look_for_waits(self, now: float, timeout: float, sink: Sink) -> None:
        if now < self._next_look:
            return
        stacks = {rank: stack for rank, stack in self._stacks.items() if rank in self.unfinished}
        silent, before = self.unfinished - stacks.keys(), self._silent
        self._silent = silent
        if silent <= before and (text := self._sentence(stacks, timeout)):  # an answer may be late once
            state = tuple((rank, stacks[rank].collective) for rank in sorted(stacks))
            if state not in self._reported:
                self._reported.add(state)
                sink.note(text)
        self._stacks = {}
        self._next_look = now + min(timeout / _LOOKS, 15.0)
        for rank in self.unfinished:
            self.tell(StackOrder(rank=rank, time=time.time(), call=self.number))

    def _sentence(self, stacks: Mapping[int, StackReport], timeout: float) -> str:
        absent = self.unfinished - stacks.keys()
        silent = {rank: 0 if self.addresses else self.pids[rank] for rank in absent}
        return hang_report.describe_wait(
            stacks, self.ranks - self.unfinished, self.pids.keys() - self.ranks, timeout, silent
        )


def put_output_first(events: Sequence[Event], drain: Callable[[int], Sequence[Event]]) -> Iterator[Event]:
    """Yield events, but what a rank has written in a call before the end of the call: it may be read later.

    Args:
        events: as they were read.
        drain: returns what a rank has written and no event has brought yet.
    """
    ended: set[int] = set()
    for number, event in enumerate(events):
        if isinstance(event, CallEnd):
            ended.add(event.rank)
            for later in (*events[number + 1 :], *drain(event.rank)):
                if later.rank == event.rank and isinstance(later, (Lines, Unfinished)):
                    yield later
        if event.rank not in ended or not isinstance(event, (Lines, Unfinished)):
            yield event
