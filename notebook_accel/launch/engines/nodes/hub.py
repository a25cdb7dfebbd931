"""Where the nodes of a run talk: a thread on the node that holds the store, to which every node is connected.

It says when all are there, or why they do not fit together; what the first failure of all was; and hands on the
value of rank 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from . import cards, frames
from .cards import Card
from .ends import End, first_of
from .frames import Message

_TOKEN_SECONDS: Final = 10.0
_PART_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 3.0  # in which other nodes say what they know after the first has failed


@dataclass(frozen=True, kw_only=True)
class Met:
    """All nodes are there: their cards in the order of their ranks, this one's rank and the hub's, their addresses."""

    node_rank: int
    host_rank: int
    cards: Sequence[Card]
    addresses: Sequence[str]


@dataclass(eq=False, kw_only=True)
class _Guest:
    writer: asyncio.StreamWriter
    address: str
    card: Card | None = None
    attempt: int = -1
    is_host: bool = False
    end: End | None = None
    has_left: bool = False

    def tell(self, message: Message) -> None:
        for piece in frames.packed(message):
            self.writer.write(piece)


class Hub:
    """The connections of all nodes, this one's too.

    Args:
        listening: a socket that listens.
        token: what a connection begins with: only those that read the store know it.
        num_nodes: how many meet.
        elects: whether nodes get their ranks here unless they named one each.
        before_again: called before the workers of an attempt start, from the second on.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: bytes,
        num_nodes: int,
        *,
        elects: bool,
        before_again: Callable[[], None],
    ) -> None:
        self._listening = listening
        self._token = token
        self._num_nodes = num_nodes
        self._elects = elects
        self._before_again = before_again
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter | None] = {}
        self._guests: list[_Guest] = []
        self._members: list[_Guest] = []
        self._attempt = -1
        self._ends: list[End] = []
        self._value: Message | None = None
        self._value_from: _Guest | None = None
        self._is_over = False
        self._settling: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="notebook_accel hub", daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def is_empty(self) -> bool:
        """Whether no node is connected any more."""
        return not self._guests

    def close(self) -> None:
        """End all connections."""
        if self._loop is not None and self._closing is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._listening.close()

    def _work(self) -> None:
        try:
            with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                loop.run_until_complete(self._serve())
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        """Take in who comes: asyncio's own server forgets, open, those who come while it closes."""
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)
        self._ready.set()
        await self._closing.wait()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        await self._disconnect()

    def _accept(self) -> None:
        assert self._loop is not None
        try:
            connection, address = self._listening.accept()
        except OSError:
            time.sleep(_PAUSE_SECONDS)  # too many files are open, or it has gone already
            return
        self._connections[self._loop.create_task(self._welcome(connection, str(address[0])))] = None

    async def _disconnect(self) -> None:
        """End all connections: tasks that were left to be cancelled would complain of it in the cell."""
        for writer in filter(None, self._connections.values()):
            writer.close()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=_PART_SECONDS)
        for writer in filter(None, self._connections.values()):
            writer.transport.abort()  # what it was told last does not arrive any more
        if self._connections:
            await asyncio.wait(list(self._connections))

    async def _welcome(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None and self._closing is not None
        reader, writer = await asyncio.open_connection(sock=connection)
        self._connections[task] = writer
        guest = _Guest(writer=writer, address=address)
        try:
            if self._closing.is_set():
                return
            frames.keep_alive(writer.get_extra_info("socket"))
            token = await asyncio.wait_for(reader.readexactly(frames.TOKEN_BYTES), _TOKEN_SECONDS)
            if not hmac.compare_digest(token, self._token):
                return
            self._guests.append(guest)
            while True:
                self._take(guest, await frames.read(reader))
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            pass  # it has gone
        finally:
            self._part(guest)
            writer.close()
            del self._connections[task]

    def _take(self, guest: _Guest, message: Message) -> None:
        if message.kind == "card":
            guest.card, guest.attempt, guest.is_host = message.value
            self._meet(guest)
        elif message.kind == "value":
            self._value, self._value_from = message, guest
        elif message.kind in ("news", "ask"):
            for other in self._members:
                if other is not guest:
                    other.tell(message)
        elif message.kind == "end":
            self._end(guest, message.value)
        elif message.kind == "bye":
            guest.has_left = True

    # -- meeting

    def _meet(self, newcomer: _Guest) -> None:
        if self._is_over:
            newcomer.tell(Message("over"))
            return
        if self._members and newcomer not in self._members:
            newcomer.tell(Message("refused", self._full()))
            return
        if self._members and newcomer.attempt > self._attempt:
            for member in self._members:
                member.tell(Message("again", newcomer.attempt))
        self._look()

    def _look(self) -> None:
        """See whether all are there, and fit together."""
        there = [guest for guest in self._guests if guest.card is not None and guest.attempt > self._attempt]
        known = [guest.card for guest in there if guest.card is not None]
        if not known or self._is_over:
            return
        complete = len(known) >= self._num_nodes
        lines = cards.disagreements(known, complete=complete)
        if not self._elects and not self._members:
            lines += cards.twice(known)
        if lines:
            text = "the nodes of this run do not fit together, nothing was started:\n"
            self._refuse(there, text + "\n".join(f"  - {line}" for line in lines))
            return
        if not complete:
            for guest in there:
                guest.tell(Message("here", known))
            return
        if not self._members:
            self._members = self._in_order(there)
        self._attempt += 1
        if self._attempt:
            self._before_again()
        self._tell_met()

    def _full(self) -> str:
        names = ", ".join(member.card.name for member in self._members if member.card is not None)
        return (
            f"the run there has its {self._num_nodes} nodes already: {names}; "
            "wait until it has ended, or choose another use_port on all nodes of this one"
        )

    def _refuse(self, guests: Sequence[_Guest], text: str) -> None:
        self._is_over = True
        for guest in guests:
            guest.tell(Message("refused", text))

    def _in_order(self, guests: Sequence[_Guest]) -> list[_Guest]:
        """Return the nodes by rank: as they were given, else the host first and the others as they came."""
        ranks = {guest.card.node_rank: guest for guest in guests if guest.card is not None}
        if sorted(ranks) == list(range(self._num_nodes)):
            return [ranks[rank] for rank in sorted(ranks)]
        return sorted(guests, key=lambda guest: not guest.is_host)

    def _tell_met(self) -> None:
        known = []
        for rank, member in enumerate(self._members):
            assert member.card is not None
            member.card = replace(member.card, node_rank=rank)
            known.append(member.card)
        host = next(rank for rank, member in enumerate(self._members) if member.is_host)
        addresses = [member.address for member in self._members]
        for rank, member in enumerate(self._members):
            met = Met(node_rank=rank, host_rank=host, cards=known, addresses=addresses)
            member.tell(Message("met", met))

    # -- ending

    def _end(self, guest: _Guest, end: End) -> None:
        if guest in self._members:
            guest.end = end
            self._ends.append(end)
        elif guest.is_host:
            others = [other for other in self._guests if other is not guest]
            self._refuse(others, f"{end.text or end.card.name}, which holds the run together")
        self._consider()

    def _part(self, guest: _Guest) -> None:
        """Note that a node is gone: before all were there it may come again."""
        if guest not in self._guests:
            return
        self._guests.remove(guest)
        if guest not in self._members:
            self._look()
        elif (
            guest.card is not None and not guest.has_left and (guest.end is None or guest.end.kind == "done")
        ):
            text = f"{guest.card.name} is gone without a word: its kernel has ended, or it is cut off the network"
            self._end(guest, End(card=guest.card, kind="lost", text=text))

    def _consider(self) -> None:
        """Decide once all have ended, or a while after the first did so badly."""
        if self._is_over or not self._members:
            return
        bad = any(end.kind != "done" for end in self._ends)
        if all(member.end is not None for member in self._members):
            self._decide()
        elif bad and self._settling is None:
            assert self._loop is not None
            self._settling = self._loop.call_later(_SETTLE_SECONDS, self._decide)
            for member in self._members:
                member.tell(Message("trouble"))

    def _decide(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._settling is not None:
            self._settling.cancel()
        cause = first_of(self._ends)
        if cause is not None and cause.hang:
            cause = replace(cause, hang="\n".join(end.hang for end in self._ends if end.hang))
        for member in self._members:
            member.tell(Message("verdict", cause))
            if cause is None and self._value is not None and member is not self._value_from:
                member.tell(self._value)
