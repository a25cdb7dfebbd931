"""The coordinator of a run: it listens where all nodes meet, on one of them, and every node is connected to it.

It says when enough nodes are there, or why they do not fit together, and lets them meet again where one has failed, is
lost or joins. At the end it says what the first failure of all was, and passes on the value of rank 0.
"""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ....errors import LaunchError
from ... import descriptors
from ...job import Rendezvous
from ...supervise.stop_agreement import Questions
from .. import stores
from . import link, messages, node_info
from .link import NodeLink
from .messages import Message
from .node_info import NodeInfo, Roster
from .outcomes import NodeOutcome, find_cause

_PROOF_SECONDS: Final = 10.0
_MAX_GUESTS: Final = 256  # connections that are of no node of the run; beyond it the oldest one makes room
_MOST_TURNED_AWAY: Final = 32  # of which the cell is told
_LOOK_SECONDS: Final = 0.2
_TELL_SECONDS: Final = 0.1  # in which more nodes come, before each is told who is there
_PART_SECONDS: Final = 1.0
_SETTLE_SECONDS: Final = 3.0  # in which other nodes say what they know after the first has failed


@dataclass(eq=False)
class _Peer:
    """A node that is connected.

    Attributes:
        link: to the node.
        is_host: whether it is the one of this process.
        node: what it says of itself, None before it has said it.
        is_ready: whether it waits for the next attempt.
        outcome: how its part ended, None before that.
        questions: of its ranks of this attempt, None before all are held.
    """

    link: NodeLink
    is_host: bool
    node: NodeInfo | None = None
    is_ready: bool = False
    outcome: NodeOutcome | None = None
    questions: Questions | None = None

    def tell(self, kind: messages.MessageKind, value: Any = None) -> None:
        """Send a message to the node."""
        self.link.say(Message(kind, value))


class Coordinator:
    """Talks to all nodes, this one too.

    Args:
        listening: a socket that listens.
        place: where the nodes meet, and how many.
        host_claim: the number by which the node of this process proves that it is the one.
        max_losses: of which attempt on a node that is gone ends the run, where all have to be there.
        last_call: seconds that more than enough nodes are waited for, where they come and go.
    """

    def __init__(
        self,
        listening: socket.socket,
        place: Rendezvous,
        host_claim: int,
        *,
        max_losses: int = 0,
        last_call: float = 0.0,
    ) -> None:
        self._listening, self._place, self._host_claim = listening, place, host_claim
        self._most, self._least = place.num_nodes, place.min_nodes or place.num_nodes
        self._max_losses, self._last_call = max_losses, last_call
        self._inbox: queue.SimpleQueue[tuple[NodeLink, Message | None] | None] = queue.SimpleQueue()
        self._strangers: list[socket.socket] = []  # that have proven nothing, oldest first
        self._peers: dict[NodeLink, _Peer] = {}  # all that are connected, oldest first
        self._members: list[_Peer] = []  # the nodes of this attempt by rank, also those that are gone
        self._attempt = -1
        self._store: Any = None  # where the workers of this attempt meet
        self._outcomes: dict[_Peer, NodeOutcome] = {}  # those that may end the run, as they came
        self._value: tuple[_Peer, Message] | None = None
        self._is_called = False  # whether the nodes are to meet again
        self._is_over = self._is_closed = False
        self._num_turned_away = 0
        self._due: dict[Callable[[], None], float] = {}
        self._threads = [
            threading.Thread(target=work, name="notebook_accel coordinator", daemon=True)
            for work in (self._accept, self._work)
        ]
        descriptors.keep_from_forks(self)
        for thread in self._threads:
            thread.start()

    @property
    def is_empty(self) -> bool:
        """Whether no node of the run is connected any more; before all are there, whether nobody is."""
        peers = list(self._peers.values())
        return not any(peer in peers for peer in self._members or peers)

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        link.shut(self._listening)  # on Linux the thread that accepts notices at once
        self._inbox.put(None)
        for thread in self._threads:
            thread.join()
        deadline = time.monotonic() + _PART_SECONDS
        for each in list(self._peers):
            each.close(max(0.0, deadline - time.monotonic()))
        self._store = None
        descriptors.forget(self)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep; those of links are theirs."""
        return [fd for each in [self._listening, *self._strangers] if (fd := each.fileno()) >= 0]

    # -- connections

    def _accept(self) -> None:
        self._listening.settimeout(_LOOK_SECONDS)
        while not self._is_closed:
            try:
                connection, _ = self._listening.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._is_closed:
                    time.sleep(_LOOK_SECONDS)  # too many files are open, or it has gone already
                continue
            welcoming = threading.Thread(target=self._welcome, args=(connection,), daemon=True)
            self._strangers.append(connection)
            self._make_room()
            try:
                welcoming.start()
            except RuntimeError:  # the system gives no more threads
                self._strangers.remove(connection)
                connection.close()
        self._listening.close()
        for stranger in list(self._strangers):
            link.shut(stranger)
        while self._strangers:  # which their threads notice
            time.sleep(_LOOK_SECONDS / 100)

    def _welcome(self, connection: socket.socket) -> None:
        try:
            accepted = link.welcome(connection, self._place.trust, _PROOF_SECONDS)
            made = NodeLink(connection, accepted.session, self._inbox, self._find_limit(is_member=False))
        except OSError:  # it has gone, or is no node
            connection.close()
        else:
            self._peers[made] = _Peer(made, accepted.claim == self._host_claim)
            made.start()
        finally:
            with contextlib.suppress(ValueError):  # it had to make room
                self._strangers.remove(connection)

    def _find_limit(self, *, is_member: bool) -> messages.Limit:
        if self._place.trust.is_proven:
            return messages.NO_LIMIT
        return messages.MEMBER_LIMIT if is_member else messages.GUEST_LIMIT

    def _make_room(self) -> None:
        """Let the oldest guest go where there are too many, first of those that have proven nothing."""
        strangers = list(self._strangers)
        guests = [peer for peer in list(self._peers.values()) if peer not in self._members]
        if len(strangers) + len(guests) <= _MAX_GUESTS + 2 * self._most:
            return
        if len(strangers) > 1:  # the last one has just come
            link.shut(self._strangers.pop(0))
        else:
            min(guests, key=lambda peer: peer.node is not None).link.end()

    def _work(self) -> None:
        try:
            self._take_all()
        finally:
            for each in list(self._peers):
                if not self._is_closed:
                    each.end()  # without a coordinator nobody may wait

    def _take_all(self) -> None:
        while not self._is_closed:
            now = time.monotonic()
            for action in [action for action, at in self._due.items() if at <= now]:
                del self._due[action]
                action()
            seconds = min([_LOOK_SECONDS, *(at - now for at in self._due.values())])
            with contextlib.suppress(queue.Empty):
                heard = self._inbox.get(timeout=max(0.0, seconds))
                if heard is not None and heard[0] in self._peers:
                    self._take(self._peers[heard[0]], heard[1])

    def _take(self, peer: _Peer, message: Message | None) -> None:
        if message is None:
            self._note_gone(peer)
        elif message.kind == "node":
            self._take_node(peer, *message.value)
        elif message.kind == "outcome":
            self._take_outcome(peer, message.value)
        elif peer not in self._members:
            return
        elif message.kind == "value":
            self._value = peer, message
        elif message.kind == "held":
            peer.questions = message.value
            self._consider_stop()
        elif message.kind in ("cause", "news", "ask", "stop"):
            for other in self._list_living():
                if other is not peer:
                    other.link.say(message)

    # -- who takes part

    def _list_living(self) -> list[_Peer]:
        """Return the nodes of this attempt that are there."""
        return [member for member in self._members if member.link in self._peers]

    def _take_node(self, peer: _Peer, node: NodeInfo, attempt: int) -> None:
        """Note that a node is ready to meet the others."""
        if self._is_over or (self._outcomes and peer not in self._members):
            peer.tell("over")
        elif attempt != (self._attempt + 1 if peer in self._members else 0):
            peer.link.end()  # it is none of ours
        elif peer not in self._members:
            peer.node, peer.is_ready = node, True
            if self._place.is_elastic:
                self._admit(peer)
            elif self._members:
                self._seat(peer)
        else:
            peer.is_ready, peer.outcome = True, None
            self._call_again(peer)
        self._consider_start()

    def _seat(self, newcomer: _Peer) -> None:
        """Give a node the place of one that is waited for, or refuse it."""
        assert newcomer.node is not None
        problem = self._describe_full()
        for rank, member in enumerate(self._members):
            is_free = self._is_called and member.link not in self._peers
            if is_free and (self._place.elects or newcomer.node.node_rank == rank):
                node = replace(newcomer.node, node_rank=rank)
                others = [each.node for each in self._list_living() if each.node is not None]
                lines = node_info.find_disagreements([*others, node], complete=True)
                if not lines:
                    newcomer.node, self._members[rank] = node, newcomer
                    self._call_again(newcomer)
                    return
                problem = f"this node does not fit to the run:\n{_itemize(lines)}"
                break
        self._refuse([newcomer], problem)

    def _describe_full(self) -> str:
        names = ", ".join(member.node.name for member in self._members if member.node is not None)
        return (
            f"the run there has its {self._most} nodes already: {names}; "
            "wait until it has ended, or choose another use_port on all nodes of this one; if one of them has just "
            "died and comes back, run its cell again in 15 s: that is when the others have noticed it"
        )

    def _admit(self, newcomer: _Peer) -> None:
        """Let a node into a run whose nodes come and go; those that do not fit to the host are turned away."""
        host = next((peer for peer in self._peers.values() if peer.is_host), None)
        if host is None or host.node is None:
            return
        for peer in list(self._peers.values()):
            if peer is host or peer.node is None or peer in self._members:
                continue
            new = replace(peer.node, node_rank=-1)
            if found := node_info.find_disagreements([host.node, new], complete=True):
                text = _itemize(found)
                why = f"this node does not fit to the one that holds the run together:\n{text}"
                self._refuse([peer], why)
                self._num_turned_away += 1
                if self._num_turned_away <= _MOST_TURNED_AWAY:
                    host.tell("turned away", f"{new.host} was not let into the run:\n{text}")
        living = self._list_living()
        has_room = len(living) < self._most and all(member.outcome is None for member in living)
        if living and newcomer.node is not None and has_room:
            self._call_again(newcomer)

    def _refuse(self, peers: Sequence[_Peer], why: str) -> None:
        for peer in peers:
            peer.node = None
            peer.tell("refused", why)

    def _call_again(self, caller: _Peer) -> None:
        """Let all nodes meet again; until then it counts as nothing that workers have ended well.

        Args:
            caller: who knows already.
        """
        gone = self._describe_gone()
        for member in self._list_living():
            if member.outcome is not None and member.outcome.kind == "done":
                member.outcome = None
            if member is not caller and not self._is_called:
                member.tell("again", (self._attempt + 1, gone))
        self._is_called = True

    def _describe_gone(self) -> str:
        """Return who is waited for, where it has to come back; else empty."""
        if self._place.is_elastic:
            left = sum(peer.node is not None for peer in self._peers.values())
            nodes = "1 node" if left == 1 else f"{left} nodes"
            return "" if left >= self._least else f"{nodes} left, at least {self._least} are needed"
        lost = (member.node for member in self._members if member.link not in self._peers)
        return next((_describe_loss(node) for node in lost if node is not None), "")

    def _note_gone(self, peer: _Peer) -> None:
        """Note that a node is gone. Before all are there it may come again, afterwards it is lost."""
        del self._peers[peer.link]
        peer.link.close()
        if peer in self._members and peer.node is not None and peer.outcome is None and not self._is_over:
            may_go_on = self._place.is_elastic or self._attempt < self._max_losses
            if may_go_on and not self._outcomes:
                self._call_again(peer)
            elif not self._place.is_elastic:
                self._take_outcome(
                    peer, NodeOutcome(node=peer.node, kind="lost", text=_describe_loss(peer.node))
                )
        self._consider_start()
        self._consider_stop()
        self._consider_end()

    # -- meeting

    def _consider_start(self, *, is_last: bool = False) -> None:
        """Start the attempt where enough nodes are there; say who is where they are not.

        Args:
            is_last: whether more than enough were waited for.
        """
        there = self._list_ready()
        if self._is_over or not there:
            return
        nodes = [peer.node for peer in there if peer.node is not None]
        if not self._place.is_elastic and not self._members and (lines := self._find_misfits(nodes)):
            self._is_over = True
            why = f"the nodes of this run do not fit together, nothing was started:\n{_itemize(lines)}"
            self._refuse(there, why)
            return
        living = self._list_living()
        is_enough = len(there) >= self._least and any(peer.is_host for peer in there)
        if not is_enough or any(member not in there for member in living):
            self._due.setdefault(self._tell_present, time.monotonic() + _TELL_SECONDS)
        elif len(there) >= self._most or is_last or all(peer in living for peer in there):
            self._start(there)
        else:  # more may be about to come
            self._due.setdefault(self._end_call, time.monotonic() + self._last_call)

    def _find_misfits(self, nodes: Sequence[NodeInfo]) -> list[str]:
        nodes = sorted(nodes, key=lambda node: node.node_rank)
        lines = node_info.find_disagreements(nodes, complete=len(nodes) >= self._most)
        return lines if self._place.elects else lines + node_info.find_duplicates(nodes)

    def _list_ready(self) -> list[_Peer]:
        return [peer for peer in self._peers.values() if peer.node is not None and peer.is_ready]

    def _tell_present(self) -> None:
        there = self._list_ready()
        present = [replace(peer.node, same={}) for peer in there if peer.node is not None]
        for peer in there:
            peer.tell("present", present)

    def _end_call(self) -> None:
        self._consider_start(is_last=True)

    def _start(self, there: Sequence[_Peer]) -> None:
        """Begin the next attempt: by the ranks that the nodes name, or the host first, then those that were there."""
        ranks = {peer.node.node_rank: peer for peer in there if peer.node is not None}
        if sorted(ranks) == list(range(self._most)) and not self._place.is_elastic:
            order = [ranks[rank] for rank in sorted(ranks)]
        else:
            old = {peer: rank for rank, peer in enumerate(self._members)}
            order = sorted(there, key=lambda peer: (not peer.is_host, old.get(peer, math.inf)))
        try:
            self._store = None  # that of the last attempt
            self._store = stores.open_store(replace(self._place, port=0))
        except LaunchError as error:
            self._is_over = True
            self._refuse(there, str(error))
            return
        for each in (self._end_call, self._tell_present):
            self._due.pop(each, None)
        self._members = order[: self._most]
        self._attempt += 1
        self._is_called, self._value = False, None
        nodes = []
        for rank, member in enumerate(self._members):
            assert member.node is not None
            member.node, member.is_ready = replace(member.node, node_rank=rank), False
            member.questions = member.outcome = None
            member.link.limit = self._find_limit(is_member=True)
            nodes.append(member.node)
        common = Roster(
            node_rank=0,
            host_rank=next(rank for rank, member in enumerate(self._members) if member.is_host),
            nodes=nodes,
            addresses=[member.link.address for member in self._members],
            attempt=self._attempt,
            port=self._store.port,
        )
        for rank, member in enumerate(self._members):
            member.tell("roster", replace(common, node_rank=rank))
        if not self._place.is_elastic:
            self._refuse([peer for peer in there if peer not in self._members], self._describe_full())

    # -- ending

    def _consider_stop(self) -> None:
        """Say at which question the ranks stop, once those of all nodes that have not ended are held."""
        running = [member for member in self._list_living() if member.outcome is None]
        held = [member.questions for member in running if member.questions is not None]
        if held and len(held) == len(running):
            questions = Questions(min(each.least for each in held), max(each.most for each in held))
            for member in running:
                member.tell("agreed", questions)

    def _take_outcome(self, peer: _Peer, outcome: NodeOutcome) -> None:
        if self._is_over:
            return
        if peer not in self._members:
            if peer.is_host and not self._members:
                self._is_over = True
                others = [other for other in self._peers.values() if other is not peer]
                self._refuse(others, f"{outcome.text or outcome.node.name}, which holds the run together")
        elif outcome.kind != "done" or not self._is_called:
            peer.outcome = outcome
            if outcome.kind != "done":
                self._outcomes[peer] = outcome
            self._consider_stop()
            self._consider_end()

    def _consider_end(self) -> None:
        """Decide why the run ended: once all nodes have ended, or a while after the first one failed.

        No later news explains why a node is lost.
        """
        cause, living = find_cause([*self._outcomes.values()]), self._list_living()
        if self._is_over or not self._members:
            return
        is_lost = cause is not None and cause.kind == "lost"
        if is_lost or (living and all(member.outcome is not None for member in living)):
            self._decide()
        elif cause is not None and self._decide not in self._due:
            self._due[self._decide] = time.monotonic() + _SETTLE_SECONDS
            for member in living:
                member.tell("trouble")

    def _decide(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        bad = [*self._outcomes.values()]
        cause = find_cause(bad)
        if cause is not None and cause.hang:
            cause = replace(cause, hang="\n".join(outcome.hang for outcome in bad if outcome.hang))
        for member in self._list_living():
            member.tell("verdict", cause)
            if cause is None and self._value is not None and member is not self._value[0]:
                member.link.say(self._value[1])


def _describe_loss(node: NodeInfo) -> str:
    return f"{node.name} is gone without a word: its kernel has ended, or it is cut off the network"


def _itemize(lines: Sequence[str]) -> str:
    return "\n".join(f"  - {line}" for line in lines)
