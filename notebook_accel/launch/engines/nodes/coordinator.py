"""The coordinator of a run: a thread on the node that holds the store, to which every node is connected.

It says when all nodes are there, or why they do not fit together. At the end it says what the first failure of all was,
and passes on the value of rank 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....stream.listener import keep_alive
from ....trust import proof
from ....trust.plain import MalformedError
from ....trust.proof import Challenge, Session
from ... import descriptors
from ...supervise.stop_agreement import Questions
from . import messages, node_info, pulse
from .messages import Limit, Message
from .node_info import NodeInfo, Roster
from .outcomes import NodeOutcome, find_cause

_PROOF_SECONDS: Final = 10.0  # from the connection until a node has proven itself and said what it is
_MAX_GUESTS: Final = 256
"""Connections besides those of the run's nodes; beyond it the oldest one makes room, which may try again."""
_MOST_TURNED_AWAY: Final = 32  # of which the cell is told
_MAX_UNREAD: Final = 1 << 22
"""Bytes that wait for a node; a value may be longer, and nothing follows it."""
_PART_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.05
_SETTLE_SECONDS: Final = 3.0  # in which other nodes say what they know after the first has failed


@dataclass(eq=False, kw_only=True)
class _Peer:
    """A node that is connected.

    Attributes:
        writer: what goes to the node.
        address: its IP address.
        session: the tags of what follows its proof; None where there is no secret.
        node: what it says of itself, None before it has said it.
        attempt: the attempt that it is ready for.
        is_host: whether it holds the store.
        outcome: how its part ended, None before that.
        questions: of its ranks of this attempt, None before all are held.
        has_left: whether it has said that it leaves.
        has_ended: whether its workers of this attempt have ended well, where nodes come and go.
        name: the name by which its pulse knows it, empty where it has none.
        pulse_of: of a silent connection, the name of the node that it belongs to; empty for other ones.
    """

    writer: asyncio.StreamWriter
    address: str
    session: Session | None = None
    node: NodeInfo | None = None
    attempt: int = -1
    is_host: bool = False
    outcome: NodeOutcome | None = None
    questions: Questions | None = None
    has_left: bool = False
    has_ended: bool = False
    name: str = ""
    pulse_of: str = ""

    def tell(self, message: Message) -> None:
        """Send a message to the node; one that does not read what it was sent is dropped."""
        if self.writer.is_closing():
            return
        if message.kind != "value" and self.writer.transport.get_write_buffer_size() > _MAX_UNREAD:
            self.writer.transport.abort()
            return
        for piece in messages.encode(message, self.session):
            self.writer.write(piece)


class Coordinator:
    """Talks to all nodes, this one too.

    Args:
        listening: a socket that listens.
        key: what a node has to know.
        num_nodes: how many nodes meet.
        elects: whether nodes may get their ranks here; False where each node names its own.
        before_restart: called before workers start, from the second attempt on.
        max_losses: of which attempt on a node that is gone ends the run; before that it is waited for.
        proven: whether the key is made of a secret.
        least: how many nodes are enough, where they come and go; 0 where all have to be there.
        last_call: seconds that more than these are waited for at the beginning.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        num_nodes: int,
        *,
        elects: bool,
        before_restart: Callable[[], None],
        max_losses: int = 0,
        proven: bool = False,
        least: int = 0,
        last_call: float = 0.0,
    ) -> None:
        self._least, self._last_call = least, last_call
        self._calling: asyncio.TimerHandle | None = None
        self._num_turned_away = 0
        self._is_called = self._is_finished = (
            False  # whether all are to meet again; whether all workers ended well
        )
        self._listening = listening
        self._max_losses = max_losses
        self._key = key
        self._proven = proven
        self._num_nodes = num_nodes
        self._elects = elects
        self._before_restart = before_restart
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter | None] = {}
        self._guests: dict[asyncio.Task[None], _Peer] = {}  # those that take no part yet, oldest first
        self._peers: list[_Peer] = []
        self._members: list[_Peer] = []
        self._attempt = -1
        self._outcomes: list[NodeOutcome] = []
        self._value: Message | None = None
        self._value_from: _Peer | None = None
        self._is_over = self._has_heard_host = False
        self._settling: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="notebook_accel coordinator", daemon=True)
        descriptors.keep_from_forks(self)
        self._thread.start()
        self._ready.wait()

    @property
    def is_empty(self) -> bool:
        """Whether no node of the run is connected any more; before all are there, whether nobody is."""
        return not any(peer in self._peers for peer in self._members or self._peers)

    @property
    def has_heard_host(self) -> bool:
        """Whether the node of this process has come and left: all that it said is heard, and was passed on."""
        return self._has_heard_host

    def close(self) -> None:
        """End all connections."""
        if self._loop is not None and self._closing is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._listening.close()
        descriptors.forget(self)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        writers = filter(None, list(self._connections.values()))
        sockets = [self._listening, *(writer.get_extra_info("socket") for writer in writers)]
        return [fd for each in sockets if (fd := each.fileno()) >= 0]

    def _work(self) -> None:
        try:
            with contextlib.closing(asyncio.SelectorEventLoop()) as loop:
                loop.run_until_complete(self._serve())
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        """Accept connections; asyncio's own server would forget, still open, those that come while it closes."""
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
        """End all connections; tasks that are left to be cancelled would complain in the cell."""
        for writer in filter(None, self._connections.values()):
            writer.close()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=_PART_SECONDS)
        for writer in filter(None, self._connections.values()):
            writer.transport.abort()  # its last messages do not arrive any more
        if self._connections:
            await asyncio.wait(list(self._connections))

    async def _welcome(self, connection: socket.socket, address: str) -> None:
        task = asyncio.current_task()
        assert task is not None and self._closing is not None
        try:
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:  # it had gone before it was greeted
            connection.close()
            del self._connections[task]
            return
        self._connections[task] = writer
        peer = _Peer(writer=writer, address=address)
        self._make_room(task, peer)
        try:
            if self._closing.is_set():
                return
            first = await asyncio.wait_for(self._hear_first(peer, reader), _PROOF_SECONDS)
            if first.kind == "pulse":
                await self._wait_for_silence(peer, str(first.value), reader)
                return
            keep_alive(writer.get_extra_info("socket"))
            self._peers.append(peer)
            self._take(peer, first)
            while True:
                self._take(peer, await messages.read(reader, peer.session, lambda: self._find_limit(peer)))
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError, MalformedError, RecursionError):
            pass  # it has gone, or is no node
        finally:
            self._guests.pop(task, None)
            self._note_gone(peer)
            self._has_heard_host |= peer.is_host
            writer.close()
            del self._connections[task]

    async def _wait_for_silence(self, peer: _Peer, name: str, reader: asyncio.StreamReader) -> None:
        """Lose a node as soon as its machine does not answer any more."""
        peer.pulse_of = name
        pulse.watch_network(peer.writer.get_extra_info("socket"))
        try:
            await reader.read(1)
        except OSError as error:
            if pulse.is_cut_off(error):
                for node in self._peers:
                    if node.name == name:
                        node.writer.transport.abort()

    async def _hear_first(self, peer: _Peer, reader: asyncio.StreamReader) -> Message:
        """Prove both ends to each other, and return what the node says first; ProofError without its proof."""
        challenge = Challenge(self._key, messages.PURPOSE)
        peer.writer.write(challenge.greeting)
        acceptance = challenge.accept(await reader.readexactly(proof.ANSWER_BYTES))
        peer.writer.write(acceptance.reply)
        peer.session = acceptance.session if self._proven else None
        return await messages.read(reader, peer.session, lambda: self._find_limit(peer))

    def _find_limit(self, peer: _Peer) -> Limit:
        """Return how much a node may say in a message."""
        if self._proven:
            return messages.NO_LIMIT
        return messages.MEMBER_LIMIT if peer in self._members else messages.GUEST_LIMIT

    def _make_room(self, task: asyncio.Task[None], peer: _Peer) -> None:
        """Note a guest; where there are too many, the oldest one leaves, first of those that have proven nothing."""
        names = {member.name for member in self._members if member.name}
        guests = self._guests = {
            each: guest
            for each, guest in self._guests.items()
            if guest not in self._members and guest.pulse_of not in names
        }
        if len(guests) >= _MAX_GUESTS + 2 * self._num_nodes:
            unproven = (
                each for each, guest in guests.items() if guest not in self._peers and not guest.pulse_of
            )
            oldest = next(unproven, None) or next(iter(guests))
            guests.pop(oldest).writer.transport.abort()
        guests[task] = peer

    def _take(self, peer: _Peer, message: Message) -> None:
        if message.kind == "node":
            may_take_part = not self._members or peer in self._members
            if may_take_part and not 0 <= message.value[1] <= self._attempt + 1:
                raise MalformedError(f"attempt {self._attempt + 1} is the next one, not {message.value[1]}")
            peer.node, peer.attempt, peer.is_host = message.value
            if peer in self._members:
                peer.node = replace(message.value[0], node_rank=self._members.index(peer))
            self._meet(peer)
        elif message.kind == "outcome":
            self._take_outcome(peer, message.value)
        elif message.kind == "bye":
            peer.has_left = True
        elif message.kind == "name":
            peer.name = message.value
        elif peer not in self._members:
            return
        elif message.kind == "value":
            self._value, self._value_from = message, peer
        elif message.kind == "ended":
            peer.has_ended = message.value == self._attempt
            self._consider_stop()
            self._consider_end()
        elif message.kind == "held":
            peer.questions = message.value
            self._consider_stop()
        elif message.kind in ("cause", "news", "ask", "stop"):
            for other in self._members:
                if other is not peer:
                    other.tell(message)

    # -- meeting

    def _meet(self, newcomer: _Peer) -> None:
        if self._is_over:
            newcomer.tell(Message("over"))
            return
        if self._least:
            self._admit(newcomer)
            return
        if self._members and newcomer not in self._members and (problem := self._seat(newcomer)):
            newcomer.tell(Message("refused", problem))
            return
        if self._members and newcomer.attempt > self._attempt:
            for member in self._members:
                member.tell(Message("again", (newcomer.attempt, "")))
        self._check_complete()

    def _seat(self, newcomer: _Peer) -> str:
        """Give a node the place of one that is gone; return why it cannot be, else empty."""
        assert newcomer.node is not None
        for rank, member in enumerate(self._members):
            if member in self._peers or not (self._elects or newcomer.node.node_rank == rank):
                continue
            node = replace(newcomer.node, node_rank=rank)
            others = [each.node for each in self._members if each in self._peers and each.node is not None]
            if lines := node_info.find_disagreements([*others, node], complete=True):
                return "this node does not fit to the run:\n" + "\n".join(f"  - {line}" for line in lines)
            newcomer.node, newcomer.attempt, self._members[rank] = node, self._attempt + 1, newcomer
            return ""
        return self._describe_full()

    def _check_complete(self) -> None:
        """Start the attempt where all nodes are there; refuse nodes that do not fit together."""
        there = [
            peer
            for peer in self._peers
            if peer.node is not None
            and peer.attempt > self._attempt
            and (not self._members or peer in self._members)  # refused ones may stay connected
        ]
        nodes = [peer.node for peer in there if peer.node is not None]
        if not nodes or self._is_over:
            return
        complete = len(nodes) >= self._num_nodes
        lines = node_info.find_disagreements(nodes, complete=complete)
        if not self._elects and not self._members:
            lines += node_info.find_duplicates(nodes)
        if lines:
            text = "the nodes of this run do not fit together, nothing was started:\n"
            self._refuse(there, text + "\n".join(f"  - {line}" for line in lines))
            return
        if not complete:
            for peer in there:
                peer.tell(Message("present", [replace(node, same={}) for node in nodes]))
            return
        if not self._members:
            self._members = self._sort(there)
        self._attempt += 1
        if self._attempt:
            self._before_restart()
        self._send_roster()

    def _admit(self, newcomer: _Peer) -> None:
        """Let a node into a run whose nodes come and go, if it fits to the one that holds the store."""
        self._turn_away()
        if newcomer.node is None:
            return
        if self._members:
            living = self._list_living()
            may_join = len(living) < self._num_nodes and not any(member.has_ended for member in living)
            if newcomer.attempt > self._attempt if newcomer in living else may_join:
                self._call_again(newcomer)
        self._check_some()

    def _call_again(self, caller: _Peer, text: str = "") -> None:
        """Let all nodes but one meet again; until then the end of their workers counts as none."""
        self._is_called = True
        for member in self._list_living():
            if member is not caller:
                member.tell(Message("again", (self._attempt + 1, text)))

    def _turn_away(self) -> None:
        """Refuse the nodes that do not fit to the one that holds the store."""
        host = next((peer for peer in self._peers if peer.is_host), None)
        if host is None or host.node is None:
            return
        for peer in self._peers:
            if peer is host or peer.node is None or peer in self._members:
                continue
            new = replace(peer.node, node_rank=-1)
            if found := node_info.find_disagreements([host.node, new], complete=True):
                text = "\n".join(f"  - {line}" for line in found)
                said = f"this node does not fit to the one that holds the run together:\n{text}"
                peer.tell(Message("refused", said))
                peer.node = None
                self._num_turned_away += 1
                if self._num_turned_away <= _MOST_TURNED_AWAY:
                    host.tell(Message("turned away", f"{new.host} was not let into the run:\n{text}"))

    def _list_living(self) -> list[_Peer]:
        """Return the nodes that take part and are there."""
        return [member for member in self._members if member in self._peers and not member.has_left]

    def _check_some(self, *, is_last: bool = False) -> None:
        """Start the attempt where enough nodes are there, of those that come and go.

        Args:
            is_last: whether more than enough were waited for.
        """
        living = self._list_living()
        there = [
            peer
            for peer in self._peers
            if peer.node is not None and (peer not in living or peer.attempt > self._attempt)
        ]
        is_due = self._is_called or not self._members
        is_ready = any(peer.is_host for peer in there) and all(member in there for member in living)
        if self._is_over or not is_due or not is_ready or len(there) < self._least:
            nodes = [replace(peer.node, same={}) for peer in there if peer.node is not None]
            for peer in there:
                peer.tell(Message("present", nodes))
            return
        has_new = any(peer not in living for peer in there)
        if has_new and len(there) < self._num_nodes and not is_last:  # more may be about to come
            if self._calling is None:
                assert self._loop is not None
                self._calling = self._loop.call_later(self._last_call, self._end_call)
            return
        order = sorted(
            there, key=lambda peer: (not peer.is_host, peer not in living, peer.node and peer.node.node_rank)
        )
        self._members = order[: self._num_nodes]
        self._attempt += 1
        self._is_called = False
        for member in self._members:
            member.has_ended = False
        self._send_roster()

    def _end_call(self) -> None:
        self._calling = None
        self._check_some(is_last=True)

    def _consider_end(self) -> None:
        """Say that the workers of all nodes have ended well."""
        living = self._list_living()
        if living and not self._is_called and all(member.has_ended for member in living):
            self._is_finished = True
            for member in living:
                member.tell(Message("all ended"))

    def _describe_full(self) -> str:
        names = ", ".join(member.node.name for member in self._members if member.node is not None)
        return (
            f"the run there has its {self._num_nodes} nodes already: {names}; "
            "wait until it has ended, or choose another use_port on all nodes of this one; if one of them has just "
            "died and comes back, run its cell again in 15 s: that is when the others have noticed it"
        )

    def _refuse(self, peers: Sequence[_Peer], text: str) -> None:
        self._is_over = True
        for peer in peers:
            peer.tell(Message("refused", text))

    def _sort(self, peers: Sequence[_Peer]) -> list[_Peer]:
        """Return the nodes by rank: as they name their ranks, else the host first and the others as they came."""
        ranks = {peer.node.node_rank: peer for peer in peers if peer.node is not None}
        if sorted(ranks) == list(range(self._num_nodes)):
            return [ranks[rank] for rank in sorted(ranks)]
        return sorted(peers, key=lambda peer: not peer.is_host)

    def _send_roster(self) -> None:
        nodes = []
        for rank, member in enumerate(self._members):
            assert member.node is not None
            member.node, member.questions = replace(member.node, node_rank=rank), None
            nodes.append(member.node)
        host = next(rank for rank, member in enumerate(self._members) if member.is_host)
        addresses = [member.address for member in self._members]
        for rank, member in enumerate(self._members):
            roster = Roster(
                node_rank=rank, host_rank=host, nodes=nodes, addresses=addresses, attempt=self._attempt
            )
            member.tell(Message("roster", roster))

    # -- ending

    def _consider_stop(self) -> None:
        """Say at which question the ranks stop, once those of all nodes that have not ended are held."""
        running = [
            member
            for member in (self._list_living() if self._least else self._members)
            if member.outcome is None and not member.has_ended
        ]
        held = [member.questions for member in running if member.questions is not None]
        if held and len(held) == len(running):
            questions = Questions(min(each.least for each in held), max(each.most for each in held))
            for member in running:
                member.tell(Message("agreed", questions))

    def _take_outcome(self, peer: _Peer, outcome: NodeOutcome) -> None:
        if peer in self._members:
            peer.outcome = outcome
            self._outcomes.append(outcome)
            self._consider_stop()
        elif peer.is_host and not self._members:
            others = [other for other in self._peers if other is not peer]
            self._refuse(others, f"{outcome.text or outcome.node.name}, which holds the run together")
        self._consider()

    def _note_gone(self, peer: _Peer) -> None:
        """Note that a node is gone. Before all are there it may come again, afterwards it is lost."""
        if peer not in self._peers:
            return
        self._peers.remove(peer)
        if self._least:
            self._note_gone_of_some(peer)
        elif peer not in self._members:
            self._check_complete()
        elif (
            peer.node is not None
            and not peer.has_left
            and (peer.outcome is None or peer.outcome.kind == "done")
        ):
            text = (
                f"{peer.node.name} is gone without a word: its kernel has ended, or it is cut off the network"
            )
            if self._attempt < self._max_losses and not self._outcomes:
                for member in self._members:
                    member.tell(Message("again", (self._attempt + 1, text)))
                return
            self._take_outcome(peer, NodeOutcome(node=peer.node, kind="lost", text=text))

    def _note_gone_of_some(self, peer: _Peer) -> None:
        """Let the other nodes start again without one that is gone."""
        goes_on = not (self._outcomes or self._is_finished or self._is_over)
        if peer in self._members and peer.outcome is None and not peer.has_ended and goes_on:
            left = sum(each.node is not None for each in self._peers)
            nodes = "1 node" if left == 1 else f"{left} nodes"
            self._call_again(
                peer, "" if left >= self._least else f"{nodes} left, at least {self._least} are needed"
            )
        self._check_some()
        self._consider_end()
        self._consider()

    def _consider(self) -> None:
        """Decide why the run ended: once all nodes have ended, or a while after the first one failed.

        No later news explains why a node is lost.
        """
        if self._is_over or not self._members:
            return
        cause = find_cause(self._outcomes)
        is_lost = cause is not None and cause.kind == "lost"
        members = self._list_living() if self._least else self._members
        if is_lost or all(member.outcome is not None for member in members):
            self._decide()
        elif cause is not None and self._settling is None:
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
        cause = find_cause(self._outcomes)
        if cause is not None and cause.hang:
            cause = replace(cause, hang="\n".join(outcome.hang for outcome in self._outcomes if outcome.hang))
        for member in self._members:
            member.tell(Message("verdict", cause))
            if cause is None and self._value is not None and member is not self._value_from:
                member.tell(self._value)
