"""How nodes meet: they check that they fit together, may come and go, and end with one cause or value."""

from __future__ import annotations

import itertools
import math
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ....errors import LaunchError
from ....events import Result
from ...checks import addresses
from ...job import Job
from ...supervise.control import Control, StopAsked
from ...supervise.stop_agreement import Questions
from ...transfer import failures
from ..base import Outcome
from . import link, messages, outcomes, values
from .coordinator import Coordinator
from .link import NodeLink, SilentError
from .messages import Message
from .node_info import NodeInfo, Roster, describe_node
from .outcomes import NodeOutcome, RestartCause
from .waiting import PeerWait, StopState, describe_lost_host, read_join_seconds

_ANYWHERE: Final = ("0.0.0.0", "::")
_LOOK_SECONDS: Final = 0.05
_SOON_SECONDS: Final = 2.0  # at the beginning, in which a node that waits looks more often
_PEER_SECONDS: Final = 3.0  # in which a node 0 looks for another one at an address that is not its own
_CONNECT_SECONDS: Final = 5.0
_OWN_SECONDS: Final = 60.0  # to connect to what this process itself has opened
_SILENT_SECONDS: Final = 20.0  # after which what listens is no coordinator
_NAMED: Final = 8  # nodes that a message names
_LAST_CALL_SECONDS: Final = 2.0
_VERDICT_SECONDS: Final = 10.0
_NOTICE_SECONDS: Final = 15.0  # in which the word of a lost node comes, where ranks have lost those of it
_LEAVE_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """The place of a node among those that have met.

    Attributes:
        node_rank: of the node.
        num_nodes: how many have met.
        first_rank: of its ranks.
        world_size: ranks of all nodes.
        address: of the store at which the ranks meet.
        port: of that store.
    """

    node_rank: int
    num_nodes: int
    first_rank: int
    world_size: int
    address: str
    port: int


class NodeRendezvous:
    """How nodes meet: by their given ranks (`static`), or in the order they come in.

    One node listens at the address that all know, and runs the coordinator. A fixed number of nodes has to be there; of
    a range, those that are there start again whenever one comes or goes.

    Args:
        job: what this node is to run.
        control: says when to stop.
        tell: takes sentences for the cell.

    Attributes:
        attempt: which start of the workers this is, counted from 0, alike on all nodes.
        interface: the network interface by which this node reaches the others, None where nobody knows.
        num_missed: how often the workers of a run of fixed nodes had started again before this one came.
        is_called: whether another node calls for the next attempt.
        is_called_off: whether something happened on another node that ends the run.
    """

    def __init__(self, job: Job, control: Control, tell: Callable[[str], None]) -> None:
        place = job.rendezvous
        host, _, port = place.endpoint.rpartition(":") if place.endpoint else (place.address, "", place.port)
        self._place = replace(place, address=str(host).strip("[]"), port=int(port or 0))
        self._job, self._control, self._check, self._tell = job, control, control.check, tell
        self._node = describe_node(job)
        self._seconds = read_join_seconds(place.settings or {})
        self.interface: str | None = None
        self.attempt, self.num_missed = -1, 0
        self.is_called = self.is_called_off = False
        self._coordinator: Coordinator | None = None
        self._link: NodeLink | None = None
        self._inbox: queue.SimpleQueue[tuple[NodeLink, Message | None]] = queue.SimpleQueue()
        self._is_lost = False
        self._roster: Roster | None = None
        self._num_before = 0  # nodes of the last attempt
        self._gone = ""
        self._cause: RestartCause | None = None  # of the others' restart
        self._verdict: Message | None = None
        self._value: Message | None = None
        self._stop_asked_at: float | None = None
        self._news_sent = self._news_heard = 0.0
        self._has_asked = self._others_ask = False
        self._stop = StopState()

    # -- meeting

    def meet(self) -> Seat:
        """Meet the other nodes.

        Raises:
            LaunchError: a node does not come in time, has left, or does not fit to the others.
        """
        self.attempt += 1
        is_elastic = self._place.is_elastic
        if self._gone:
            for_whom = ": waiting for others" if is_elastic else "; waiting until it comes back"
            self._tell(f"{self._gone}{for_whom}, {self._seconds:g} s at most")
        who = "this node" if is_elastic else f"node {self._place.node_rank} of {self._place.num_nodes}"
        wait = PeerWait(self._seconds, who, self._tell, self._check)
        if self._link is None:
            self._open(wait)
        self._num_before = 0 if self._roster is None else len(self._roster.nodes)
        self._roster = roster = self._wait_for_all(wait)
        self._others_ask, self._stop = False, StopState()  # that was about workers of the last attempt
        self.is_called = False
        self.num_missed = 0 if is_elastic else roster.attempt - self.attempt
        self.attempt = roster.attempt
        if wait.is_reported:
            self._tell(f"all {len(roster.nodes)} nodes are there, after {wait.waited:.0f} s")
        others = [address for rank, address in enumerate(roster.addresses) if rank != roster.node_rank]
        if others and self._link is not None:
            towards = others[0] if roster.node_rank == roster.host_rank else self._link.address
            self.interface = addresses.find_interface_to(towards)
        counts = [node.processes for node in roster.nodes]
        return Seat(
            node_rank=roster.node_rank,
            num_nodes=len(counts),
            first_rank=sum(counts[: roster.node_rank]),
            world_size=sum(counts),
            address=self._place.address,
            port=roster.port,
        )

    def _wait_for_all(self, wait: PeerWait) -> Roster:
        """Return the roster, once all nodes are there."""
        present: Sequence[NodeInfo] = [self._node]
        self._say("node", (self._node, self.attempt))
        while True:
            message = self._hear(_LOOK_SECONDS)
            if self._is_lost or (message is not None and message.kind == "over"):
                if self.attempt or self._coordinator is not None:
                    raise LaunchError(f"{self._name_host()} has left: its own notebook or terminal says why")
                self._reconnect(wait)
            elif message is None:
                wait.look(self._describe_missing(present), self._describe_too_few())
            elif message.kind == "present":
                present = message.value
            elif message.kind == "roster":
                roster: Roster = message.value
                return roster
            elif message.kind == "refused":
                raise LaunchError(str(message.value))
            elif self._verdict is not None:
                raise LaunchError("the workers cannot start again: the other nodes have ended")

    def _reconnect(self, wait: PeerWait) -> None:
        """Connect again: another run at this place ends just now, and this one begins afterwards."""
        self._disconnect()
        time.sleep(_LOOK_SECONDS)
        self._connect(wait)
        self._say("node", (self._node, self.attempt))

    def _describe_missing(self, present: Sequence[NodeInfo]) -> str:
        """Return whom this node waits for."""
        place = self._place
        if place.is_elastic:
            return f"others, {len(present)} of at least {_format_count(place.min_nodes, 'node')} there"
        count, ranks = place.num_nodes, {node.node_rank for node in present}
        if place.elects and self._roster is None:
            more = count - len(present)
            hosts = ", ".join(sorted(node.host for node in present))
            return (
                f"{more} more {'node' if more == 1 else 'nodes'} ({len(present)} of {count} there: {hosts})"
            )
        missing = (node for node in range(count) if node not in ranks)
        named = [self._name_node(node) for node in itertools.islice(missing, _NAMED)]
        more = count - len(ranks) - len(named)
        return ", ".join([*named, *([f"{more} more nodes"] if more else [])])

    def _name_node(self, node: int) -> str:
        each = self._node.processes
        first, last = node * each, node * each + each - 1
        return f"node {node} ({f'rank {first}' if each == 1 else f'ranks {first} to {last}'})"

    def _describe_too_few(self) -> str:
        least, most = self._place.min_nodes, self._place.num_nodes
        return self._place.is_elastic * (
            f"fewer than {_format_count(least, 'node')} were there after {self._seconds:g} s, "
            f"num_nodes='{least}:{most}' asks for as many; rdzv_conf={{'join_timeout': seconds}} sets how long to wait"
        )

    def _name_host(self) -> str:
        if self._roster is not None:
            return self._roster.nodes[self._roster.host_rank].name
        return f"{'the node' if self._place.elects else 'node 0'} at {self._where}"

    @property
    def _where(self) -> str:
        return f"{self._place.address}:{self._place.port}"

    # -- the connection

    def _open(self, wait: PeerWait) -> None:
        """Run the coordinator where that is this node's part, and connect to it.

        A node 0 whose address belongs to another machine looks there for a node 0 first: one of the two is wrong.
        """
        place, settings = self._place, self._place.settings or {}
        is_here = not addresses.find_listen_problem(place.address, 0)
        may_host = place.node_rank == 0 and (is_here or not place.elects)
        if place.elects and "is_host" in settings:
            may_host = str(settings["is_host"]).lower() in ("true", "1", "t", "yes", "y")
        elif may_host and not is_here:
            try:
                self._connect(PeerWait(_PEER_SECONDS, "node 0", self._tell, self._check))
                return
            except LaunchError:
                pass  # an address that leads here from outside, perhaps
        if not may_host or not self._host_run():
            self._connect(wait)

    def _host_run(self) -> bool:
        """Listen, run the coordinator and connect to it; return False where another node of this machine was first."""
        place, settings = self._place, self._place.settings or {}
        where = f"node 0 cannot listen at {self._where}"
        try:
            if addresses.find_listen_problem(place.address, 0) and not addresses.is_this_machine(
                place.address, place.port
            ):
                raise LaunchError(
                    f"{where}: that is no address of this machine; master_addr is the address of node 0"
                )
            listening = addresses.listen_for_nodes(place.address, place.port)
            own, claim = listening.getsockname()[0], secrets.randbits(32)
            last_call = min(float(settings.get("last_call_timeout", _LAST_CALL_SECONDS)), self._seconds / 3)
            self._coordinator = Coordinator(
                listening, place, claim, max_losses=self._job.max_restarts, last_call=last_call
            )
            self._connect_to("127.0.0.1" if own in _ANYWHERE else own, _OWN_SECONDS, claim)
        except OSError as error:
            if place.elects and self._coordinator is None:
                return False
            raise LaunchError(f"{where}: {error.strerror or error}") from None
        return True

    def _connect_to(self, host: str, seconds: float = _CONNECT_SECONDS, claim: int = 0) -> None:
        """Connect to the coordinator; OSError where that cannot be now."""
        trust = self._place.trust
        connection, session = link.connect(host, self._place.port, trust, seconds, claim)
        limit = messages.NO_LIMIT if trust.is_proven else messages.MEMBER_LIMIT
        self._link, self._is_lost = NodeLink(connection, session, self._inbox, limit), False
        self._link.start()

    def _connect(self, wait: PeerWait) -> None:
        """Connect to the coordinator as soon as that can be; LaunchError where it cannot in time."""
        whom, hint, silent_since = self._name_host(), "", math.inf
        if not self._place.elects and addresses.is_loopback(self._place.address):
            hint = f"; {self._place.address} is this machine itself, master_addr is the address of node 0"
        while True:
            began = time.monotonic()
            try:
                self._connect_to(self._place.address)
                return
            except SilentError as error:
                reason, silent_since = str(error), min(began, silent_since)
            except OSError as error:
                reason, silent_since = error.strerror or str(error), math.inf
            if time.monotonic() - silent_since > _SILENT_SECONDS:
                raise LaunchError(
                    f"what listens at {self._where} does not answer as a node of a run: "
                    "another program may have the port, choose another use_port on all nodes"
                )
            wait.look(f"{whom} ({reason}{hint})")
            time.sleep(_LOOK_SECONDS if wait.waited > _SOON_SECONDS else _LOOK_SECONDS / 10)

    def _say(self, kind: messages.MessageKind, value: Any = None) -> None:
        if self._link is not None:
            self._link.say(Message(kind, value))

    def _hear(self, seconds: float = 0.0) -> Message | None:
        """Take the next message, and return it; None where none comes in time, or the connection has ended."""
        try:
            source, message = self._inbox.get(timeout=seconds) if seconds else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if source is not self._link:
            return None  # of an earlier run at this place
        if message is None:
            self._is_lost = True
        else:
            self._take(message)
        return message

    def hear_all(self) -> None:
        """Take what the others have said."""
        while self._hear() is not None:
            pass
        self.is_called_off = self.is_called_off or self._is_lost

    def _take(self, message: Message) -> None:
        if message.kind == "again":
            attempt, self._gone = message.value
            self.is_called = attempt > self.attempt
        elif message.kind == "cause":
            self._cause = outcomes.choose_cause([each for each in (self._cause, message.value) if each])
        elif message.kind == "trouble":
            self.is_called_off = True
        elif message.kind == "verdict":
            self._verdict = message
            self.is_called_off = self.is_called_off or message.value is not None
        elif message.kind == "value":
            self._value = message
        elif message.kind == "news":
            self._news_heard = time.monotonic()
        elif message.kind == "ask":
            self._others_ask = True
        elif message.kind == "stop":
            self._stop.is_asked = True
        elif message.kind == "turned away":
            self._tell(message.value)
        elif message.kind == "agreed":
            self._stop.questions = message.value

    # -- while workers run

    def wait_for_word(self) -> bool:
        """Wait for word of a node that is lost or starts again, since workers here lost a peer; return if it came."""
        may_restart = self._place.is_elastic or self._job.max_restarts
        deadline = time.monotonic() + (_NOTICE_SECONDS if may_restart else 0.0)
        while time.monotonic() < deadline and not self.is_called_off:
            self._check()
            self.hear_all()
            if self.is_called:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def explain_restart(self, world_size: int) -> str:
        """Return why workers start again because of other nodes; empty where these said nothing."""
        gone, cause = self._gone, self._cause  # told before the nodes met again
        self._gone, self._cause = "", None
        if self._place.is_elastic:
            return self._explain_change(world_size, cause)
        if gone:
            return f"{gone}; it is back"
        return "" if cause is None else cause.text

    def _explain_change(self, world_size: int, cause: RestartCause | None) -> str:
        """Return which nodes have come or gone, and what happened besides."""
        assert self._roster is not None
        count, before = len(self._roster.nodes), self._num_before
        if count == before:
            return "" if cause is None else cause.text
        change = "joined" if count > before else "lost"
        several = "s" if abs(count - before) > 1 else ""
        size = f"{_format_count(count, 'node')}, {_format_count(world_size, 'rank')}"
        text = f"node{several} {change}: {size}; workers start again"
        return text if cause is None or cause.follows else f"{cause.text}; {text}"

    def share_cause(self, cause: RestartCause) -> None:
        """Tell other nodes why the workers of this node start again; comes before it meets them again."""
        self._say("cause", replace(cause, text=f"{self._find_own_node().name}: {cause.text}"))

    def share_news(self, news: float, *, ask: bool, every: float) -> tuple[float, bool]:
        """Exchange with other nodes whether anything was heard of ranks.

        Args:
            news: when something was heard last of ranks here, by the monotonic clock.
            ask: whether the ranks here are being asked where they are.
            every: seconds between two messages about news.

        Returns:
            When something was heard last of ranks elsewhere, by this node's monotonic clock; and whether another node
            has begun to ask its ranks since the last call.
        """
        self.hear_all()
        if ask and not self._has_asked:
            self._say("ask")
        self._has_asked = ask
        now = time.monotonic()
        if news > self._news_sent and now - self._news_sent > every:
            self._news_sent = now
            self._say("news")
        others_ask, self._others_ask = self._others_ask, False
        return self._news_heard, others_ask

    def share_stop(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        """Exchange with other nodes how a stop of the run stands; see `ShareStop`."""
        self.hear_all()
        stop = self._stop
        if asks and not stop.is_asked:
            stop.is_asked = True
            self._say("stop")
        if own is not None and not stop.is_held:
            stop.is_held = True
            self._say("held", own)
        return stop.is_asked, stop.questions

    # -- ending

    def finish(self, outcome: Outcome, first: Result | None, *, is_complete: bool) -> Outcome | None:
        """Say how this node's part ended, and agree with the other nodes on how the run did.

        Args:
            outcome: how it ended here.
            first: of rank 0, where it is of this node and has returned.
            is_complete: whether all ranks of this node have.

        Returns:
            How the run ended, alike on all nodes; None where other nodes call for the next attempt.
        """
        if outcome.was_stopped and self._may_leave:
            return outcome
        own = outcomes.summarize(outcome, self._find_own_node(), is_complete=is_complete)
        if own.kind == "done" and self._wants_value and first is not None and self._link is not None:
            self._link.say(values.make_message(first, outcome.values, self._place.trust))
        self._say_outcome(own)
        if self._roster is None:  # it was stopped while others waited as well
            return outcome
        try:
            return self._agree(own, outcome)
        except StopAsked:
            if not self._may_leave:
                self._say_stopped()
            return Outcome(stopped=outcome.stopped, was_stopped=True)

    def _agree(self, own: NodeOutcome, outcome: Outcome) -> Outcome | None:
        """Wait for the verdict. A node that failed waits a moment only, and then goes by its own failure."""
        is_well = own.kind == "done"
        wait = PeerWait(
            math.inf, f"node {own.node.node_rank}, which has ended,", self._tell, self._check_patiently
        )
        while self._verdict is None and (is_well or wait.waited < _VERDICT_SECONDS):
            heard = self._hear(_LOOK_SECONDS)
            if is_well and self.is_called:
                return None
            if self._is_lost:
                break
            if heard is None and is_well:
                wait.look("the others")
        cause = None if self._verdict is None else self._verdict.value
        if self._verdict is None and self._is_lost:
            cause = self._make_host_outcome()
        if cause is not None and (cause.node.node_rank != own.node.node_rank or cause.hang):
            return outcomes.blame(cause, outcome)
        if cause is not None or not is_well or not self._wants_value or 0 in outcome.values:
            return outcome
        while self._value is None:
            self._check_patiently()
            self._hear(_LOOK_SECONDS)
            if self._is_lost and self._value is None:
                return outcomes.blame(self._make_host_outcome(), outcome)
        value = values.read(self._value, self._place.trust)
        return Outcome(values={0: value}, stopped=outcome.stopped)

    def give_up(self, error: BaseException) -> Outcome | None:
        """Tell the other nodes that this one ends by an error; return how the run ended, where that explains it."""
        if self._verdict is not None:
            cause = self._verdict.value if isinstance(error, LaunchError) else None
            return None if cause is None else outcomes.blame(cause, Outcome())
        if not isinstance(error, (KeyboardInterrupt, StopAsked)):
            node = self._find_own_node()
            text = f"{node.name} failed: {failures.describe_error(error)}"
            self._say_outcome(NodeOutcome(node=node, kind="failed", text=text))
        elif not self._may_leave:
            self._say_stopped()
        return None

    @property
    def _may_leave(self) -> bool:
        """Whether the others go on where this node is stopped."""
        return self._place.is_elastic and self._coordinator is None

    @property
    def _wants_value(self) -> bool:
        return self._job.returns == "first"

    def _find_own_node(self) -> NodeInfo:
        return self._roster.nodes[self._roster.node_rank] if self._roster is not None else self._node

    def _say_outcome(self, outcome: NodeOutcome) -> None:
        if not self._place.trust.is_proven:
            outcome = outcomes.shorten(outcome, messages.MEMBER_LIMIT.value)
        self._say("outcome", outcome)

    def _say_stopped(self) -> None:
        node = self._find_own_node()
        self._say_outcome(NodeOutcome(node=node, kind="stopped", text=f"{node.name} was stopped"))

    def _check_patiently(self) -> None:
        """Raise StopAsked once workers of other nodes, which may be asked to stop too, have had their time."""
        try:
            self._check()
        except StopAsked:
            now = time.monotonic()
            if self._stop_asked_at is None:
                self._stop_asked_at = now
                self.share_stop(True, None)
            if self._control.signum is not None or now - self._stop_asked_at > self._control.grace:
                raise

    def _make_host_outcome(self) -> NodeOutcome:
        assert self._roster is not None
        node = self._roster.nodes[self._roster.host_rank]
        return NodeOutcome(node=node, kind="lost", text=describe_lost_host(node.name, self._where))

    def leave(self) -> None:
        """Leave; the node with the coordinator stays until the others have heard what they wait for."""
        coordinator, self._coordinator = self._coordinator, None
        try:
            self._disconnect()
            if coordinator is None:
                return
            deadline = time.monotonic() + (_LEAVE_SECONDS if self._verdict is None else math.inf)
            while not coordinator.is_empty and time.monotonic() < deadline:
                self._check()
                time.sleep(_LOOK_SECONDS / 25)
        except StopAsked:
            pass  # there is nothing more to stop here
        finally:
            if coordinator is not None:
                coordinator.close()

    def _disconnect(self) -> None:
        """End the connection, once the coordinator has taken what was said on it."""
        last, self._link = self._link, None
        if last is not None:
            last.close(_LEAVE_SECONDS)


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
