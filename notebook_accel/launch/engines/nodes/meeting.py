"""How nodes meet: they check that they fit together, may come and go, and end with one cause or value."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistError

from ....errors import LaunchError
from ....stream.record import RunRecord
from ....trust import proof
from ....trust.plain import MalformedError
from ...checks import addresses
from ...job import Job
from ...supervise.control import StopAsked
from ...supervise.stop_agreement import Questions
from ...transfer import failures
from ..base import Outcome
from . import outcomes, stores, values
from .coordinator import Coordinator
from .messages import MEMBER_LIMIT, CoordinatorConnection, Message
from .node_info import NodeInfo, Roster, describe_node
from .node_store import NodeStore
from .outcomes import NodeOutcome, RestartCause
from .rendezvous import (
    PeerWait,
    StopState,
    describe_lost_host,
    name_lost_host,
    read_join_seconds,
)

_PREFIX: Final = "notebook_accel nodes/"
_COORDINATOR: Final = f"{_PREFIX}coordinator by proof"
_ANYWHERE: Final = ("0.0.0.0", "::")
_LOOK_SECONDS: Final = 0.05
_SOON_SECONDS: Final = 2.0  # at the beginning, in which a node that waits looks more often
_PEER_SECONDS: Final = 3.0  # in which a node 0 looks for another one at an address that is not its own
_OWN_SECONDS: Final = 60.0  # to connect to what this process itself has opened
_NAMED: Final = 8  # nodes that a message names
_LAST_CALL_SECONDS: Final = 2.0
_VERDICT_SECONDS: Final = 10.0
_CUT_SECONDS: Final = 15.0  # in which a cut network is noticed
_NOTICE_SECONDS: Final = 3.0  # in which the word of a lost node comes, where ranks have lost those of it
_LEAVE_SECONDS: Final = 5.0
_HEARD_SECONDS: Final = 10.0  # in which a thread of this process reads what another one has said
_STOP_SECONDS: Final = 30.0


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

    One node holds torch's store, at the address that all know, and runs the coordinator, whose port is in the store. A
    fixed number of nodes has to be there; of a range, those that are there start again whenever one comes or goes.

    Args:
        job: what this node is to run.

    Attributes:
        attempt: which start of the workers this is, counted from 0, alike on all nodes.
        check: called now and then during waits; its exception ends the wait.
        tell: takes sentences for the cell.
        interface: the network interface by which this node reaches the others, None where nobody knows.
        num_missed: how often the workers of this run had started again before this node came.
        is_called_off: whether something happened on another node that ends the run.
        seconds_to_notice: how long it takes at most until a lost node is noticed; 0 where none may be lost.
    """

    def __init__(self, job: Job) -> None:
        self._place = place = job.rendezvous
        self.check: Callable[[], None] = lambda: None
        self.tell: Callable[[str], None] = lambda text: None
        self.interface: str | None = None
        self.attempt, self.num_missed, self.is_called_off = -1, 0, False
        host, _, port = place.endpoint.rpartition(":") if place.endpoint else (place.address, "", place.port)
        self._host, self._port = str(host).strip("[]"), int(port or 0)
        self._trust = place.trust
        self._wants_first = job.returns == "first"
        self._node = describe_node(job)
        self._seconds = read_join_seconds(place.settings or {})
        self._is_elastic = place.is_elastic
        self._elects = place.backend != "static" or place.is_elastic
        self._is_finished = self._has_told_end = False
        self._before = 0  # nodes of the last attempt
        self._workers_store: Any = None
        self._token = b""  # of this run alone: what was said in an earlier one is none of it
        self._store: NodeStore | None = None
        self._coordinator: Coordinator | None = None
        self._connection: CoordinatorConnection | None = None
        self._roster: Roster | None = None
        self._called_attempt = -1
        self._gone = ""
        self._causes: list[RestartCause] = []
        self.seconds_to_notice = _NOTICE_SECONDS if job.max_restarts else 0.0
        if self._is_elastic:
            self.seconds_to_notice = _CUT_SECONDS
        self._max_restarts = job.max_restarts
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
        who = "this node" if self._is_elastic else f"node {self._place.node_rank} of {self._place.num_nodes}"
        wait = PeerWait(self._seconds, who, self.tell, self.check)
        if self._connection is None:
            self._connection = self._open(wait)
        if (
            self.attempt
            and self._coordinator is not None
            and not self._is_elastic
            and not hasattr(self._store, "list_keys")
        ):
            raise LaunchError(
                "workers of a fixed number of nodes can only start again with torch 2.10 or newer"
            )
        self._before = 0 if self._roster is None else len(self._roster.nodes)
        self._workers_store = None  # the next one may need its port
        self._roster = roster = self._wait_for_all(wait)
        self._others_ask, self._stop = False, StopState()  # that was about workers of the last attempt
        self._is_finished = self._has_told_end = False
        if self.attempt < roster.attempt:
            self.attempt = roster.attempt
            self.num_missed = 0 if self._is_elastic else roster.attempt
        if wait.is_reported:
            self.tell(f"all {len(roster.nodes)} nodes are there, after {wait.waited:.0f} s")
        others = [address for rank, address in enumerate(roster.addresses) if rank != roster.node_rank]
        if others:
            towards = others[0] if roster.node_rank == roster.host_rank else self._connection.peer
            self.interface = addresses.find_interface_to(towards)
        counts = [node.processes for node in roster.nodes]
        return Seat(
            node_rank=roster.node_rank,
            num_nodes=len(counts),
            first_rank=sum(counts[: roster.node_rank]),
            world_size=sum(counts),
            address=self._host,
            port=self._open_for_workers() if self._is_elastic else self._port,
        )

    def _open_for_workers(self) -> int:
        """Return the port of a new store for the workers: of a run whose nodes come and go each attempt has its own."""
        name, store = f"{_PREFIX}attempt {self.attempt}/workers", self._store
        signed = f"{self._token.hex()} {name}"
        assert store is not None
        try:
            if self._coordinator is not None:
                self._workers_store = stores.open_store(replace(self._place, address=self._host, port=0))
                store.set(name, self._trust.write(signed, int, self._workers_store.port))
            while not store.check([name]):
                self.check()
                self.num_nodes_waiting()  # takes what the others said
                if self.is_called_off:
                    raise LaunchError(f"{self._name_host()} has opened no store for the ranks")
                time.sleep(_LOOK_SECONDS)
            port: int = self._trust.read(signed, int, store.get(name))
        except DistError as error:
            raise self.make_host_error(error) from None
        except MalformedError as error:
            raise LaunchError(
                f"a stranger wrote into the store at {self._host}:{self._port}: {error}"
            ) from None
        return port

    def _wait_for_all(self, wait: PeerWait) -> Roster:
        """Return the roster, once all nodes are there."""
        present: Sequence[NodeInfo] = [self._node]
        self._send_node()
        while True:
            assert self._connection is not None
            message = self._connection.hear(_LOOK_SECONDS)
            if message is None and not self._connection.is_lost:
                if self._is_elastic and wait.waited > self._seconds:
                    raise LaunchError(self._describe_too_few())
                wait.look(self._describe_missing(present))
            elif message is None or message.kind == "over":
                if self.attempt or self._coordinator is not None:
                    raise LaunchError(f"{self._name_host()} has left: its own notebook or terminal says why")
                self._reconnect(wait)
            elif message.kind == "present":
                present = message.value
            elif message.kind == "roster":
                roster: Roster = message.value
                return roster
            elif message.kind == "refused":
                raise LaunchError(str(message.value))
            else:
                self._take(message)
                if self._verdict is not None:
                    raise LaunchError(
                        f"the workers cannot start again: {outcomes.describe(self._verdict.value)}"
                    )

    def _send_node(self) -> None:
        assert self._connection is not None
        self._connection.say(Message("node", (self._node, self.attempt, self._coordinator is not None)))

    def _reconnect(self, wait: PeerWait) -> None:
        """Connect again: another run at this place ends just now, and this one begins afterwards."""
        assert self._connection is not None
        self._connection.say(Message("bye"))
        self._connection.close()
        self._connection = self._store = None
        time.sleep(_LOOK_SECONDS)
        self._connection = self._connect(wait)
        self._send_node()

    def _describe_missing(self, present: Sequence[NodeInfo]) -> str:
        """Return whom this node waits for."""
        if self._is_elastic:
            return f"others, {len(present)} of at least {_format_count(self._place.min_nodes, 'node')} there"
        count, ranks = self._place.num_nodes, {node.node_rank for node in present}
        if self._elects and self._roster is None:
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

    def _open(self, wait: PeerWait) -> CoordinatorConnection:
        """Open store and coordinator where that is this node's part, and connect to the coordinator.

        A node 0 whose address belongs to another machine looks there for a node 0 first: one of the two is wrong.
        """
        is_first = self._place.node_rank == 0
        is_here = not addresses.find_listen_problem(self._host, 0)
        if not self._elects and is_first and not is_here:
            try:
                return self._connect(PeerWait(_PEER_SECONDS, "node 0", self.tell, self.check))
            except LaunchError:
                is_here = True  # an address that leads here from outside, perhaps
        may_host = is_first and is_here
        settings = self._place.settings or {}
        if self._elects and "is_host" in settings:
            may_host = str(settings["is_host"]).lower() in ("true", "1", "t", "yes", "y")
        if may_host and (connection := self._host_run()) is not None:
            return connection
        return self._connect(wait)

    def _host_run(self) -> CoordinatorConnection | None:
        """Open store and coordinator; None where another node of this machine was first, which is as good."""
        where = f"{self._host}:{self._port}"
        try:
            if addresses.find_listen_problem(self._host, 0) and not addresses.is_this_machine(
                self._host, self._port
            ):
                raise LaunchError(
                    f"node 0 cannot open a store at {where}: "
                    "that is no address of this machine; master_addr is the address of node 0"
                )
            store = NodeStore(stores.open_for_nodes(self._host, self._port))
        except (DistError, OSError) as error:
            # a system may let the port be taken at all addresses while another one listens at this one
            if self._elects and any(
                addresses.find_listen_problem(each, self._port) for each in (self._host, "")
            ):
                return None
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise LaunchError(f"node 0 cannot open a store at {where}: {reason}") from None
        store.set_timeout(timedelta(seconds=self._seconds))
        token, settings = proof.make_key(), self._place.settings or {}
        listening = addresses.listen_for_nodes(self._host)
        self._store, (own, port) = store, listening.getsockname()[:2]
        self._coordinator = Coordinator(
            listening,
            self._trust.derive_key(token),
            self._place.num_nodes,
            elects=self._elects,
            before_restart=self._forget_workers,
            max_losses=self._max_restarts,
            proven=self._trust.is_proven,
            least=self._place.min_nodes if self._is_elastic else 0,
            last_call=min(float(settings.get("last_call_timeout", _LAST_CALL_SECONDS)), self._seconds / 3),
        )
        here = "127.0.0.1" if own in _ANYWHERE else own
        connection = self._connect_to_coordinator(here, port, token, _OWN_SECONDS)
        self._token = token
        store.set(_COORDINATOR, self._trust.write(_COORDINATOR, tuple[int, bytes], (port, token)))
        return connection

    def _connect_to_coordinator(
        self, host: str, port: int, token: bytes, seconds: float = stores.CONNECT_SECONDS
    ) -> CoordinatorConnection:
        key, proven = self._trust.derive_key(token), self._trust.is_proven
        return CoordinatorConnection(host, port, key, seconds, proven=proven)

    def _connect(self, wait: PeerWait) -> CoordinatorConnection:
        whom, hint = self._name_host(), ""
        if not self._elects and addresses.is_loopback(self._host):
            hint = f"; {self._host} is this machine itself, master_addr is the address of node 0"
        while True:
            try:
                if (connection := self._find_coordinator()) is not None:
                    return connection
                reason = "it is no run's store, or no node 0 of this version"
            except (DistError, OSError, MalformedError) as error:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            wait.look(f"{whom} ({reason}{hint})")
            time.sleep(_LOOK_SECONDS if wait.waited > _SOON_SECONDS else _LOOK_SECONDS / 10)

    def _find_coordinator(self) -> CoordinatorConnection | None:
        """Read in the store where the coordinator is, and connect; None where the store does not say it."""
        store = NodeStore(stores.connect_store(self._host, self._port, self.check))
        deadline = time.monotonic() + stores.PROBE_SECONDS
        while not store.check([_COORDINATOR]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_SECONDS / 10)
        port, token = self._trust.read(_COORDINATOR, tuple[int, bytes], store.get(_COORDINATOR))
        connection = self._connect_to_coordinator(self._host, port, token)
        key = self._trust.derive_key(token)
        connection.start_pulse(self._host, port, key, stores.CONNECT_SECONDS)
        store.set_timeout(timedelta(seconds=self._seconds))
        self._store, self._token = store, token
        return connection

    def _forget_workers(self) -> None:
        """Remove what ended workers wrote: new ones would take their addresses for each other's."""
        assert self._store is not None
        for key in self._store.list_keys():
            if not key.startswith(_PREFIX):
                self._store.delete_key(key)

    def _name_host(self) -> str:
        if self._roster is not None:
            return self._roster.nodes[self._roster.host_rank].name
        return f"{'the node' if self._elects else 'node 0'} at {self._host}:{self._port}"

    # -- while workers run

    def num_nodes_waiting(self) -> int:
        """Return 1 where another node calls for the next attempt; take what the others say besides."""
        while self._connection is not None and (message := self._connection.hear(0)) is not None:
            self._take(message)
        if self._connection is not None and self._connection.is_lost:
            self.is_called_off = True
        return int(self._called_attempt > self.attempt and not self.is_called_off)

    def _take(self, message: Message) -> None:
        if message.kind == "again":
            attempt, gone = message.value
            if not self._is_elastic or attempt > self._called_attempt:
                self._gone = gone
            self._called_attempt = max(self._called_attempt, attempt)
        elif message.kind == "cause":
            self._causes.append(message.value)
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
            self.tell(message.value)
        elif message.kind == "all ended":
            self._is_finished = True
        elif message.kind == "agreed":
            self._stop.questions = message.value

    def wait_for_change(self, seconds: float) -> bool:
        """Wait for news of a lost or restarting node, for which workers here lost a peer; return whether it came."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.is_called_off:
            self.check()
            if self.num_nodes_waiting():
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def explain_restart(self, world_size: int) -> str:
        """Return why workers start again because of other nodes; empty where these said nothing."""
        cause = outcomes.choose_cause(self._causes)  # of the last attempt: told before the nodes met again
        self._causes = []
        if self._is_elastic:
            return self._explain_change(world_size, cause)
        if self._gone:
            return f"{self._gone}; it is back"
        return "" if cause is None else cause.text

    def _explain_change(self, world_size: int, cause: RestartCause | None) -> str:
        """Return which nodes have come or gone, and what happened besides."""
        assert self._roster is not None
        count = len(self._roster.nodes)
        if count == self._before:
            return "" if cause is None else cause.text
        change = "joined" if count > self._before else "lost"
        several = "s" if abs(count - self._before) > 1 else ""
        size = f"{_format_count(count, 'node')}, {_format_count(world_size, 'rank')}"
        text = f"node{several} {change}: {size}; workers start again"
        return text if cause is None or cause.follows else f"{cause.text}; {text}"

    def _describe_too_few(self) -> str:
        least, most = self._place.min_nodes, self._place.num_nodes
        return (
            f"fewer than {_format_count(least, 'node')} were there after {self._seconds:g} s, "
            f"num_nodes='{least}:{most}' asks for as many; rdzv_conf={{'join_timeout': seconds}} sets how long to wait"
        )

    def finish_attempt(self) -> bool:
        """Say that this node's workers have ended well; return whether those of all nodes have.

        While others run, nodes that come and go may start all workers again.
        """
        if not self._is_elastic:
            return True
        if not self._has_told_end and self._connection is not None:
            self._has_told_end = True
            self._connection.say(Message("ended", self.attempt))
        self.num_nodes_waiting()  # takes what the others said
        return self._is_finished

    def share_cause(self, cause: RestartCause) -> None:
        """Tell other nodes why the workers of this node start again; comes before it meets them again."""
        if self._connection is not None:
            text = f"{self._find_own_node().name}: {cause.text}"
            self._connection.say(Message("cause", replace(cause, text=text)))

    def describe_shortage(self) -> str:
        """Return that nodes are gone and have to come back, empty where enough are left."""
        for_whom = "waiting for others" if self._is_elastic else "waiting until it comes back"
        between = ":" if self._is_elastic else ";"
        return f"{self._gone}{between} {for_whom}, {self._seconds:g} s at most" if self._gone else ""

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
        self.num_nodes_waiting()  # takes what the others said
        assert self._connection is not None
        if ask and not self._has_asked:
            self._connection.say(Message("ask"))
        self._has_asked = ask
        now = time.monotonic()
        if news > self._news_sent and now - self._news_sent > every:
            self._news_sent = now
            self._connection.say(Message("news"))
        others_ask, self._others_ask = self._others_ask, False
        return self._news_heard, others_ask

    def share_stop(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        """Exchange with other nodes how a stop of the run stands; see `ShareStop`."""
        self.num_nodes_waiting()  # takes what the others said
        assert self._connection is not None
        stop = self._stop
        if asks and not stop.is_asked:
            stop.is_asked = True
            self._connection.say(Message("stop"))
        if own is not None and not stop.is_held:
            stop.is_held = True
            self._connection.say(Message("held", own))
        return stop.is_asked, stop.questions

    # -- ending

    def conclude(self, run_workers: Callable[[], Outcome], record: RunRecord) -> Outcome:
        """Run this node's part, and agree with the other nodes on how the run ended.

        Args:
            run_workers: runs this node's workers to their end, and returns how they ended.
            record: has the results of this node's ranks.

        Returns:
            How the run ended, alike on all nodes.
        """
        try:
            outcome = run_workers()
        except BaseException as error:
            if self._may_leave and isinstance(error, (KeyboardInterrupt, StopAsked, LaunchError)):
                if isinstance(error, LaunchError) and self._verdict is not None and self._verdict.value:
                    return outcomes.blame(self._verdict.value, Outcome())
            elif isinstance(error, (KeyboardInterrupt, StopAsked)):
                self._send_stopped()
            else:
                node = self._find_own_node()
                text = f"{node.name} failed: {failures.describe_error(error)}"
                self._send_outcome(NodeOutcome(node=node, kind="failed", text=text))
            raise
        if outcome.was_stopped and self._may_leave:
            return outcome
        node = self._find_own_node()
        own = outcomes.summarize(outcome, node, is_complete=len(record.results) >= node.processes)
        if self._roster is None or self._connection is None:
            self._send_outcome(own)  # it was stopped while others waited as well
            return outcome
        if own.kind == "done" and self._wants_first and 0 in record.results:
            self._connection.say(values.make_message(record.results[0], outcome.values, self._trust))
        self._send_outcome(own)
        try:
            cause = self._wait_for_verdict(is_well=own.kind == "done")
        except StopAsked:
            self._send_stopped()
            return Outcome(stopped=outcome.stopped, was_stopped=True)
        if cause is None and own.kind == "done":
            return self._add_value(outcome)
        if cause is None or (cause.node.node_rank == own.node.node_rank and not cause.hang):
            return outcome
        return outcomes.blame(cause, outcome)

    @property
    def _may_leave(self) -> bool:
        """Whether the others go on where this node is stopped."""
        return self._is_elastic and self._coordinator is None

    def _find_own_node(self) -> NodeInfo:
        return self._roster.nodes[self._roster.node_rank] if self._roster is not None else self._node

    def _send_outcome(self, outcome: NodeOutcome) -> None:
        if self._connection is not None:
            if not self._trust.is_proven:
                outcome = outcomes.shorten(outcome, MEMBER_LIMIT.value)
            self._connection.say(Message("outcome", outcome))

    def _send_stopped(self) -> None:
        node = self._find_own_node()
        self._send_outcome(NodeOutcome(node=node, kind="stopped", text=f"{node.name} was stopped"))

    def _wait_for_verdict(self, *, is_well: bool) -> NodeOutcome | None:
        """Return why the run ended, None where every node ended well.

        A node that failed waits a moment only, and then goes by its own failure.
        """
        assert self._connection is not None
        seconds = math.inf if is_well else _VERDICT_SECONDS
        who = f"node {self._find_own_node().node_rank}, which has ended,"
        wait = PeerWait(math.inf, who, self.tell, self._check_patiently)
        while self._verdict is None and wait.waited < seconds:
            if (message := self._connection.hear(_LOOK_SECONDS)) is not None:
                self._take(message)
                if is_well and self._called_attempt > self.attempt:
                    raise LaunchError("another node starts its workers again, this node's have ended well")
            elif self._connection.is_lost:
                return self._make_host_outcome()
            elif is_well:
                wait.look("the others")
        verdict: NodeOutcome | None = None if self._verdict is None else self._verdict.value
        return verdict

    def _check_patiently(self) -> None:
        """Raise StopAsked once workers of other nodes, which may be asked to stop too, have had their time."""
        try:
            self.check()
        except StopAsked:
            now = time.monotonic()
            if self._stop_asked_at is None:
                self._stop_asked_at = now
            if now - self._stop_asked_at > _STOP_SECONDS:
                raise

    def _make_host_outcome(self) -> NodeOutcome:
        assert self._roster is not None
        node = self._roster.nodes[self._roster.host_rank]
        text = describe_lost_host(node.name, f"{self._host}:{self._port}")
        return NodeOutcome(node=node, kind="lost", text=text)

    def make_host_error(self, error: BaseException) -> LaunchError:
        """Return the error of a launch whose store is gone, with the name of the node that held it."""
        assert self._roster is not None
        name = self._roster.nodes[self._roster.host_rank].name
        return name_lost_host(name, f"{self._host}:{self._port}", error)

    def _add_value(self, outcome: Outcome) -> Outcome:
        """Put rank 0's value, from whichever node it is, into the outcome."""
        if not self._wants_first or 0 in outcome.values:
            return outcome
        assert self._connection is not None
        while self._value is None:
            self._check_patiently()
            if (message := self._connection.hear(_LOOK_SECONDS)) is not None:
                self._take(message)
            elif self._connection.is_lost:
                return outcomes.blame(self._make_host_outcome(), outcome)
        return Outcome(values={0: values.read(self._value, self._trust)}, stopped=outcome.stopped)

    def leave(self) -> None:
        """Leave; the node with the coordinator stays until the others have heard what they wait for."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.say(Message("bye"))
            connection.close()
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            heard_by = time.monotonic() + (_HEARD_SECONDS if connection is not None else 0)
            while not coordinator.has_heard_host and time.monotonic() < heard_by:
                time.sleep(_LOOK_SECONDS / 25)  # else the others would not learn how this node has ended
            try:
                deadline = time.monotonic() + (_LEAVE_SECONDS if self._verdict is None else math.inf)
                while not coordinator.is_empty and time.monotonic() < deadline:
                    self.check()
                    time.sleep(_LOOK_SECONDS / 25)
            except StopAsked:
                pass  # there is nothing more to stop here
            finally:
                coordinator.close()
        self._store = self._workers_store = None


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
