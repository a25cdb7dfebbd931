"""Nodes that may join and leave a run: torch elastic's dynamic rendezvous, over a store that one of them holds."""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout

from ....errors import LaunchError
from ....stream.record import RunRecord
from ....trust.plain import MalformedError
from ...checks import addresses
from ...checks.addresses import find_listen_problem
from ...job import Job
from ...supervise.stop_agreement import Questions
from ..base import Outcome
from . import outcomes, stores
from .dynamic import Backend, DynamicRendezvous
from .messages import MEMBER_LIMIT
from .node_info import NodeInfo, describe_node, find_disagreements
from .node_store import AnyStore, NodeStore
from .outcomes import NodeOutcome, RestartCause
from .rendezvous import NodeRendezvous, PeerWait, name_lost_host, read_join_seconds
from .round_news import RoundNews

_Place = tuple[
    bool, int, int, str
]  # of a node in a round: whether others host, its given rank, its place, its address
_Host = tuple[NodeInfo, str]  # the node that holds the store, and a token that no other run has
_LOOK_SECONDS = 0.1
_STORE_SECONDS = 30.0
_NODE = "notebook_accel elastic/node"
_TURNED_AWAY = "notebook_accel elastic/turned away"
_OUTCOME = "notebook_accel elastic/outcome"
_MOST_TURNED_AWAY = 32  # that the cell is told of
_LAST_SECONDS = 5.0
_HANG_SECONDS = 7.0  # at most: a rank that cannot answer is waited for five
_LAST_CALL_SECONDS = 2.0  # torch looks for news once a second: nodes of the last round must be able to come
_ROUND_SECONDS = 3.0  # torch needs them after the last call, to see that nodes are enough
_BEAT_SECONDS = 2.0
_BEATS = 3  # that a node may miss before it counts as lost


class ElasticNodes(NodeRendezvous):
    """The rendezvous of a number of nodes between `min_nodes` and `num_nodes`.

    The node with `node_rank=0`, on the machine that the address belongs to, holds the store and has the first ranks.
    Without it the run ends. When another node comes or goes, all nodes start their workers again.

    Args:
        job: what this node is to run.
    """

    seconds_to_tell = _HANG_SECONDS

    def __init__(self, job: Job) -> None:
        place = job.rendezvous
        super().__init__(place)
        self._trust = place.trust
        self._node = describe_node(job)
        host, _, port = place.endpoint.rpartition(":") if place.endpoint else (place.address, "", place.port)
        self._host = str(host).strip("[]")
        self._port = int(port or 0)
        settings = place.settings or {}
        self._seconds = read_join_seconds(settings)
        self._last_call = float(settings.get("last_call_timeout", min(_LAST_CALL_SECONDS, self._seconds / 3)))
        self._beat = float(settings.get("keep_alive_interval", _BEAT_SECONDS))
        self._beats = int(settings.get("keep_alive_max_attempt", _BEATS))
        self.seconds_to_notice = self._beat * (self._beats + 1) + 1.0
        self._is_host = False
        self._run_token = ""
        self._store: NodeStore | None = None
        self._host_name = "the node"
        self._meeting: DynamicRendezvous | None = None
        self._round: AnyStore | None = None
        self._workers_store: TCPStore | None = None
        self._place_in_round = 0
        self._num_nodes = 0
        self._before = 0
        self._num_turned_away = 0
        self._news: RoundNews | None = None
        self._last_news: RoundNews | None = None
        self._is_closing = False

    def get_backend(self) -> str:
        return "elastic-nodes"

    # -- meeting

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the nodes that are there.

        Raises:
            LaunchError: they are too few, or the run has ended.
        """
        self._before, self._last_news = self._num_nodes, self._news
        self._workers_store = None
        try:
            while True:
                found = self._try_to_meet()
                if found is None:
                    continue
                assert self._meeting is not None
                self.attempt = self._meeting.round
                self._round, self._place_in_round, self._num_nodes = found.store, found.rank, found.world_size
                self._news = self._make_news(found)
                where = self._assign_ranks(found)
                if where is not None:
                    return where
        except RendezvousClosedError:
            raise LaunchError(
                "the run has ended on another node: its own notebook or terminal says why"
            ) from None
        except RendezvousTimeoutError:
            raise LaunchError(self._describe_too_few()) from None
        except (RendezvousConnectionError, DistError) as error:
            raise self.make_host_error(error) from None
        except MalformedError as error:
            raise LaunchError(
                f"a stranger wrote into the store at {self._host}:{self._port}: {error}"
            ) from None

    def _try_to_meet(self) -> RendezvousInfo | None:
        """Meet whoever is there; None where another run at this place is just ending: then this one comes next."""
        try:
            if self._meeting is None:
                self._store = self._open_or_find_store()
                self._check_fit(self._store)
                self._meeting = self._make_rendezvous(self._store)
            assert self._store is not None
            found = self._meeting.meet(self._store.inner, self._make_wait_check())
            store: Any = NodeStore(found.store, like=self._store)
            return RendezvousInfo(store, found.rank, found.world_size, found.bootstrap_store_info)  # type: ignore[arg-type]
        except (RendezvousClosedError, RendezvousConnectionError, DistError):
            if self.attempt >= 0 or self._is_host:
                raise
        # without `leave`: this node takes part in nothing, and torch would complain of the lost store
        self._meeting = self._store = None
        time.sleep(_LOOK_SECONDS)
        return None

    def _make_wait_check(self) -> Callable[[], None]:
        """Return what is called during a wait for other nodes; it reports the wait now and then."""
        wait = PeerWait(math.inf, "this node", self.tell, self._check)

        def look() -> None:
            there = 0 if self._meeting is None else self._meeting.size
            wait.look(f"others, {there} of at least {_format_count(self._place.min_nodes, 'node')} there")

        return look

    def _check(self) -> None:
        self.check()
        self._report_turned_away()

    def _report_turned_away(self) -> None:
        if self._is_host and self._store is not None:
            while self._num_turned_away < _MOST_TURNED_AWAY and self._store.check(
                [key := f"{_TURNED_AWAY}/{self._num_turned_away}"]
            ):
                self._num_turned_away += 1
                with contextlib.suppress(MalformedError):  # a stranger wrote it
                    self.tell(self._read(self._store, key, str))

    def _open_or_find_store(self) -> NodeStore:
        """Open the store where this node is to hold it; else wait for the node that does."""
        where = f"{self._host}:{self._port}"
        if self._place.node_rank == 0 and not find_listen_problem(self._host, self._port):
            self._is_host = True
            own = stores.open_store(replace(self._place, address=self._host, port=self._port))
            own.set_timeout(timedelta(seconds=_STORE_SECONDS))
            return NodeStore(own)
        wait = PeerWait(self._seconds, "this node", self.tell, self.check)
        while True:
            try:
                store = NodeStore(stores.connect_store(self._host, self._port, self.check))
                store.set_timeout(timedelta(seconds=_STORE_SECONDS))
                return store
            except (DistError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            wait.look(
                f"a node that opens the store at {where} ({reason}): the one on the machine of that address, "
                "with node_rank=0"
            )
            time.sleep(_LOOK_SECONDS)

    def _check_fit(self, store: NodeStore) -> None:
        """Compare this node with the one that holds the store; LaunchError where they do not fit."""
        if self._is_host:
            self._run_token = secrets.token_hex()
            self._write(store, _NODE, _Host, (self._node, self._run_token))
            return
        deadline = time.monotonic() + stores.CONNECT_SECONDS
        while not store.check([_NODE]):
            self.check()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the store at {self._host}:{self._port} is none of a run with num_nodes='min:max': "
                    "choose another port on all nodes"
                )
            time.sleep(_LOOK_SECONDS)
        try:
            host, self._run_token = self._read(store, _NODE, _Host)
        except MalformedError as error:
            raise LaunchError(
                f"this node does not fit to the run at {self._host}:{self._port}: {error}"
            ) from None
        self._host_name = f"node 0 ({host.host})"
        nodes = [host, replace(self._node, node_rank=-1)]
        lines = find_disagreements(nodes, complete=True)
        if lines:
            text = "\n".join(f"  - {line}" for line in lines)
            number = store.add(_TURNED_AWAY, 1) - 1
            said = f"{self._node.host} was not let into the run:\n{text}"
            self._write(store, f"{_TURNED_AWAY}/{number}", str, said)
            raise LaunchError(f"this node does not fit to the one that holds the run together:\n{text}")

    def _make_rendezvous(self, store: NodeStore) -> DynamicRendezvous:
        last_call = timedelta(seconds=self._last_call)
        rendezvous = DynamicRendezvous.from_backend(
            self._place.run_id,
            store.inner,
            Backend(store, self._place.run_id, last_call, self._trust, self._run_token),
            self._place.min_nodes,
            self._place.num_nodes,
            local_addr=socket.gethostname(),
            timeout=RendezvousTimeout(
                join=timedelta(seconds=max(self._seconds, self._last_call + _ROUND_SECONDS)),
                last_call=last_call,
                heartbeat=timedelta(seconds=_STORE_SECONDS),
            ),
            keep_alive_interval=self._beat,  # type: ignore[arg-type]
            keep_alive_max_attempt=self._beats,
        )
        assert isinstance(rendezvous, DynamicRendezvous)
        return rendezvous

    def _assign_ranks(self, found: RendezvousInfo) -> RendezvousInfo | None:
        """Give the nodes of a round their ranks, and their workers a new store; None where a node was lost meanwhile.

        Torch's handler opens that store once in its life. Nodes that come later would never hear of it, and new workers
        would find what ended ones wrote.
        """
        store, count = found.store, found.world_size
        own = "" if self._is_host else addresses.find_own_address(self._host)
        entry = (not self._is_host, self._place.node_rank, found.rank, own)
        self._write(store, f"node {found.rank}", _Place, entry)
        if not self._wait_for([f"node {rank}" for rank in range(count)]):
            return None
        order = sorted(self._read(store, f"node {rank}", _Place) for rank in range(count))
        places = [place for _, _, place, _ in order]
        if found.rank not in places:
            raise MalformedError(f"no node of the round has place {found.rank}")
        rank = places.index(found.rank)
        self._node = replace(self._node, node_rank=rank)
        others = [address for _, _, place, address in order if place != found.rank and address]
        if not self._is_host or others:
            self.interface = addresses.find_interface_to(others[0] if self._is_host else self._host)
        if self._is_host:
            self._workers_store = stores.open_store(replace(self._place, address=self._host, port=0))
            self._write(store, "workers", int, self._workers_store.port)
        if not self._wait_for(["workers"]):
            return None
        port = self._read(store, "workers", int)
        if not 0 < port < 1 << 16:
            raise MalformedError(f"{port} is no port")
        where = RendezvousStoreInfo(master_addr=self._host, master_port=port)
        return RendezvousInfo(store, rank, count, where)

    def _make_news(self, found: RendezvousInfo) -> RoundNews:
        return RoundNews(
            found.store,
            found.rank,
            found.world_size,
            functools.partial(self._write, found.store),
            functools.partial(self._read, found.store),
            self._list_ended,
        )

    def _wait_for(self, keys: list[str]) -> bool:
        assert self._round is not None
        wait = PeerWait(self._seconds, "this node", self.tell, self.check)
        while not self._round.check(keys):
            wait.look("the other nodes of this round")
            if self.num_nodes_waiting():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    # -- while workers run

    def num_nodes_waiting(self) -> int:
        """Return 1 where the workers are to start again: a node came, or one of this round is gone.

        Nobody is let in any more once a node's workers have ended well.
        """
        self._report_turned_away()
        present, waiting, _ = self._look()
        gone = set(range(self._num_nodes)) - present
        ended = self._list_ended()
        return int(bool(gone - ended) or (waiting > 0 and not ended))

    def share_stop(self, asks: bool, own: Questions | None) -> tuple[bool, Questions | None]:
        with self._name_lost_host():
            return self._get_news().share_stop(asks, own)

    def share_news(self, news: float, *, ask: bool, every: float) -> tuple[float, bool]:
        with self._name_lost_host():
            return self._get_news().share_news(news, ask=ask, every=every)

    def share_hang(self, report: str) -> bool:
        try:
            return self._get_news().share_hang(f"{self._node.name}: {report}")
        except DistError:  # the node that held the store has told all that it knows, and left
            return True

    def share_cause(self, cause: RestartCause) -> None:
        with self._name_lost_host():
            self._get_news().share_cause(replace(cause, text=f"{self._node.name}: {cause.text}"))

    def _get_news(self) -> RoundNews:
        assert self._news is not None
        return self._news

    @contextlib.contextmanager
    def _name_lost_host(self) -> Iterator[None]:
        try:
            yield
        except DistError as error:
            raise self.make_host_error(error) from None

    def wait_for_change(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            if self.num_nodes_waiting():
                return True
            if self._look()[2]:
                return False
            time.sleep(_LOOK_SECONDS)
        return False

    def finish_attempt(self) -> bool:
        assert self._round is not None
        with self._name_lost_host():
            self._round.set(f"ended {self._place_in_round}", "")
            return len(self._list_ended()) == self._num_nodes

    def _list_ended(self) -> set[int]:
        assert self._round is not None
        with self._name_lost_host():
            return {rank for rank in range(self._num_nodes) if self._round.check([f"ended {rank}"])}

    def _look(self) -> tuple[set[int], int, bool]:
        assert self._meeting is not None
        try:
            return self._meeting.look()
        except RendezvousError as error:
            raise self.make_host_error(error) from None

    # -- what the cell is told

    def explain_restart(self, world_size: int) -> str:
        with self._name_lost_host():
            cause = None if self._last_news is None else self._last_news.find_cause()
        if self._num_nodes == self._before:
            return "" if cause is None else cause.text
        change = "joined" if self._num_nodes > self._before else "lost"
        several = "s" if abs(self._num_nodes - self._before) > 1 else ""
        text = f"node{several} {change}: {self._describe_size(world_size)}; workers start again"
        return text if cause is None or cause.follows else f"{cause.text}; {text}"

    def _describe_size(self, world_size: int) -> str:
        return f"{_format_count(self._num_nodes, 'node')}, {_format_count(world_size, 'rank')}"

    def describe_shortage(self) -> str:
        present, waiting, is_closed = self._look()
        left, least = len(present) + waiting, self._place.min_nodes
        if is_closed or left >= least:
            return ""
        return (
            f"{_format_count(left, 'node')} left, at least {least} are needed: "
            f"waiting for others, {self._seconds:g} s at most"
        )

    def _describe_too_few(self) -> str:
        return (
            f"fewer than {_format_count(self._place.min_nodes, 'node')} were there after {self._seconds:g} s, "
            f"num_nodes='{self._place.min_nodes}:{self._place.num_nodes}' asks for as many; "
            "rdzv_conf={'join_timeout': seconds} sets how long to wait"
        )

    def make_host_error(self, error: BaseException) -> LaunchError:
        self._meeting = None  # to leave it would fail, as the connection is broken
        return name_lost_host(self._host_name, f"{self._host}:{self._port}", error.__cause__ or error)

    # -- the end

    def conclude(self, run_workers: Callable[[], Outcome], record: RunRecord) -> Outcome:
        try:
            outcome = run_workers()
        except LaunchError:
            if (cause := self._read_outcome()) is None:
                raise
            return outcomes.blame(cause, Outcome())
        if outcome.was_stopped:
            return outcome  # the others go on
        own = outcomes.summarize(outcome, self._node, is_complete=True)
        if own.hang and self._news is not None:
            own = replace(own, hang=self._news.hang or own.hang)
        if own.kind != "done":
            cause = self._read_outcome()
            if cause is not None and (own.follows or not outcome.failures):
                outcome = outcomes.blame(cause, outcome)
            elif cause is None:
                self._write_outcome(own)
                outcome = replace(outcome, hang=own.hang)
        self.set_closed()
        return outcome

    def _write_outcome(self, outcome: NodeOutcome) -> None:
        if self._store is not None:
            with contextlib.suppress(DistError):  # the node that held the store was first
                if not self._trust.is_proven:
                    outcome = outcomes.shorten(outcome, MEMBER_LIMIT.value)
                self._write(self._store, _OUTCOME, NodeOutcome, outcome)

    def _read_outcome(self) -> NodeOutcome | None:
        """Return why the run ended, as the node wrote it that ended it; None where none did."""
        if self._store is None:
            return None
        try:
            if not self._store.check([_OUTCOME]):
                return None
            outcome: NodeOutcome = self._read(self._store, _OUTCOME, NodeOutcome)
        except (DistError, MalformedError):  # the node that held the store has left, or a stranger wrote it
            return None
        return outcome

    def _write(self, store: AnyStore, name: str, kind: Any, value: Any) -> None:
        store.set(name, self._trust.write(self._name_entry(store, name), kind, value))

    def _read(self, store: AnyStore, name: str, kind: Any) -> Any:
        """Return an entry of a store; MalformedError where no node of the run wrote it."""
        return self._trust.read(self._name_entry(store, name), kind, store.get(name))

    def _name_entry(self, store: AnyStore, name: str) -> str:
        """Return the name that an entry is signed for: what was said in an earlier run is none of this one."""
        if name == _NODE:
            return name  # it has the token
        return f"{self._run_token} {'run' if store is self._store else 'round'}: {name}"

    def set_closed(self) -> None:
        """End the run for all nodes: all workers have ended well, or those of this node have failed for good."""
        self._is_closing = True
        if self._meeting is not None:
            with contextlib.suppress(RendezvousError):  # the node that held the store was first
                self._meeting.set_closed()

    def shutdown(self) -> bool:
        """Leave the run. If it has ended, the node that holds the store waits a moment for the others to leave."""
        meeting, self._meeting = self._meeting, None
        try:
            if meeting is not None:
                meeting.leave()
                deadline = time.monotonic() + (_LAST_SECONDS if self._is_host and self._is_closing else 0.0)
                while time.monotonic() < deadline and meeting.look(fresh=True)[0]:
                    time.sleep(_LOOK_SECONDS)
        except RendezvousError:
            return False
        finally:
            self._store = self._workers_store = self._round = self._news = self._last_news = None
        return True


def _format_count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
