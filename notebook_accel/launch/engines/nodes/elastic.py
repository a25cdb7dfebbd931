"""Nodes that may join and leave a run: torch elastic's dynamic rendezvous over a store that one of them holds."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, Store, TCPStore
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
from ... import addresses
from ...addresses import unusable
from ...job import Job
from ..base import Outcome
from . import stores
from .cards import card_of, disagreements
from .ends import End, by_another, end_of
from .meeting import Backend, Meeting
from .rendezvous import OTHERS_START_AGAIN, OwnHandler, Patience, join_seconds

_LOOK_SECONDS = 0.1
_STORE_SECONDS = 30.0
_CARD = "notebook_accel elastic/card"
_TURNED_AWAY = "notebook_accel elastic/turned away"
_END = "notebook_accel elastic/end"
_LAST_SECONDS = 5.0
_LAST_CALL_SECONDS = 2.0  # torch looks for news once a second: nodes of the last round must be able to come
_ROUND_SECONDS = 3.0  # that torch takes, after the last call, to see that nodes are enough
_BEAT_SECONDS = 2.0
_BEATS = 3  # missed ones, after which a node is taken for lost


class ElasticNodes(OwnHandler):
    """The rendezvous of between `min_nodes` and `num_nodes` nodes.

    The node that is called 0, on the machine that the address belongs to, holds the store and has the first ranks;
    without it the run ends. A node of the run that comes or goes makes all start their workers again.
    """

    def __init__(self, job: Job) -> None:
        place = job.rendezvous
        super().__init__(place)
        self._card = card_of(job)
        host, _, port = place.endpoint.rpartition(":") if place.endpoint else (place.address, "", place.port)
        self._host = str(host).strip("[]")
        self._port = int(port or 0)
        settings = place.settings or {}
        self._seconds = join_seconds(settings)
        self._last_call = float(settings.get("last_call_timeout", min(_LAST_CALL_SECONDS, self._seconds / 3)))
        self._beat = float(settings.get("keep_alive_interval", _BEAT_SECONDS))
        self._beats = int(settings.get("keep_alive_max_attempt", _BEATS))
        self.seconds_to_notice = self._beat * (self._beats + 1) + 1.0
        self._is_host = False
        self._store: TCPStore | None = None
        self._meeting: Meeting | None = None
        self._round: Store | None = None
        self._workers_store: TCPStore | None = None
        self._place_in_round = 0
        self._num_nodes = 0
        self._before = 0
        self._turned_away = 0
        self._is_closing = False

    def get_backend(self) -> str:
        return "elastic-nodes"

    # -- meeting

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the nodes that are there; LaunchError where they are too few, or the run has ended."""
        self._before = self._num_nodes
        self._workers_store = None
        try:
            while True:
                found = self._met()
                if found is None:
                    continue
                assert self._meeting is not None
                self.attempt = self._meeting.round
                self._round, self._place_in_round, self._num_nodes = found.store, found.rank, found.world_size
                where = self._agree(found)
                if where is not None:
                    return where
        except RendezvousClosedError:
            raise LaunchError(
                "the run has ended on another node: its own notebook or terminal says why"
            ) from None
        except RendezvousTimeoutError:
            raise LaunchError(self._too_few()) from None
        except (RendezvousConnectionError, DistError) as error:
            raise self._host_left(error) from None

    def _met(self) -> RendezvousInfo | None:
        """Meet whoever is there; None where the run that was there ends just now: this node's begins afterwards."""
        try:
            if self._meeting is None:
                self._store = self._reach()
                self._fit_in(self._store)
                self._meeting = self._meeting_at(self._store)
            return self._meeting.meet(self._store, self._patience())
        except (RendezvousClosedError, RendezvousConnectionError, DistError):
            if self.attempt >= 0 or self._is_host:
                raise
        # there is nothing to leave, and torch would complain of a lost store
        self._meeting = self._store = None
        time.sleep(_LOOK_SECONDS)
        return None

    def _patience(self) -> Callable[[], None]:
        """Return what is called during a wait for others: it says for whom now and then."""
        patience = Patience(math.inf, "this node", self.tell, self._checked)

        def look() -> None:
            there = 0 if self._meeting is None else self._meeting.size
            patience.look(f"others, {there} of at least {_counted(self._place.min_nodes, 'node')} there")

        return look

    def _checked(self) -> None:
        self.check()
        self._tell_who_was_turned_away()

    def _tell_who_was_turned_away(self) -> None:
        if self._is_host and self._store is not None:
            while self._store.check([key := f"{_TURNED_AWAY}/{self._turned_away}"]):
                self._turned_away += 1
                self.tell(self._store.get(key).decode())

    def _reach(self) -> TCPStore:
        """Open the store where that is this node's part, else find it."""
        where = f"{self._host}:{self._port}"
        if self._place.node_rank == 0 and not unusable(self._host, self._port):
            self._is_host = True
            store = stores.opened(replace(self._place, address=self._host, port=self._port))
            store.set_timeout(timedelta(seconds=_STORE_SECONDS))
            return store
        patience = Patience(self._seconds, "this node", self.tell, self.check)
        while True:
            try:
                store = stores.found(self._host, self._port, self.check)
                store.set_timeout(timedelta(seconds=_STORE_SECONDS))
                return store
            except (DistError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            patience.look(
                f"a node that opens the store at {where} ({reason}): the one on the machine of that address, "
                "with node_rank=0"
            )
            time.sleep(_LOOK_SECONDS)

    def _fit_in(self, store: TCPStore) -> None:
        """Say how this node is made, where it holds the store; else LaunchError where it does not fit to that one."""
        if self._is_host:
            store.set(_CARD, pickle.dumps(self._card).hex())
            return
        deadline = time.monotonic() + stores.CONNECT_SECONDS
        while not store.check([_CARD]):
            self.check()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the store at {self._host}:{self._port} is none of a run with num_nodes='min:max': "
                    "choose another port on all nodes"
                )
            time.sleep(_LOOK_SECONDS)
        cards = [_loaded(store.get(_CARD)), replace(self._card, node_rank=-1)]
        lines = disagreements(cards, complete=True)
        if lines:
            text = "\n".join(f"  - {line}" for line in lines)
            number = store.add(_TURNED_AWAY, 1) - 1
            store.set(f"{_TURNED_AWAY}/{number}", f"{self._card.host} was not let into the run:\n{text}")
            raise LaunchError(f"this node does not fit to the one that holds the run together:\n{text}")

    def _meeting_at(self, store: TCPStore) -> Meeting:
        last_call = timedelta(seconds=self._last_call)
        made = Meeting.from_backend(
            self._place.run_id,
            store,
            Backend(store, self._place.run_id, last_call),
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
        assert isinstance(made, Meeting)
        return made

    def _agree(self, found: RendezvousInfo) -> RendezvousInfo | None:
        """Give the nodes of a round their ranks, and their workers a new store; None where one was lost meanwhile.

        Torch's handler opens that store once in its life: nodes that come later would never hear of it, and new workers
        would find what ended ones wrote.
        """
        store, count = found.store, found.world_size
        own = "" if self._is_host else addresses.own_address(self._host)
        store.set(
            f"node {found.rank}", json.dumps([not self._is_host, self._place.node_rank, found.rank, own])
        )
        if not self._wait_for([f"node {rank}" for rank in range(count)]):
            return None
        order = sorted(json.loads(store.get(f"node {rank}")) for rank in range(count))
        rank = [place for _, _, place, _ in order].index(found.rank)
        self._card = replace(self._card, node_rank=rank)
        others = [address for _, _, place, address in order if place != found.rank and address]
        if not self._is_host or others:
            self.interface = addresses.interface_towards(others[0] if self._is_host else self._host)
        if self._is_host:
            self._workers_store = stores.opened(replace(self._place, address=self._host, port=None))
            store.set("workers", str(self._workers_store.port))
        if not self._wait_for(["workers"]):
            return None
        port = int(store.get("workers"))
        where = RendezvousStoreInfo(master_addr=self._host, master_port=port)
        return RendezvousInfo(store, rank, count, where)

    def _wait_for(self, keys: list[str]) -> bool:
        assert self._round is not None
        while not self._round.check(keys):
            self.check()
            if self.num_nodes_waiting():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    # -- while workers run

    def num_nodes_waiting(self) -> int:
        """Return 1 where the workers are to start again: a node came, or one of this round is gone.

        Nobody is let in any more once a node's workers have ended well.
        """
        self._tell_who_was_turned_away()
        present, waiting, _ = self._look()
        gone = set(range(self._num_nodes)) - present
        ended = self._ended()
        return int(bool(gone - ended) or (waiting > 0 and not ended))

    def changed_within(self, seconds: float) -> bool:
        """Wait for a reason outside this node why its workers lost a peer; return whether there is one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            if self.num_nodes_waiting():
                return True
            if self._look()[2]:
                return False
            time.sleep(_LOOK_SECONDS)
        return False

    def all_have_ended(self) -> bool:
        """Say that this node's workers have ended well; return whether those of all nodes have."""
        assert self._round is not None
        try:
            self._round.set(f"ended {self._place_in_round}", "")
            return len(self._ended()) == self._num_nodes
        except DistError as error:
            raise self._host_left(error) from None

    def _ended(self) -> set[int]:
        assert self._round is not None
        try:
            return {rank for rank in range(self._num_nodes) if self._round.check([f"ended {rank}"])}
        except DistError as error:
            raise self._host_left(error) from None

    def _look(self) -> tuple[set[int], int, bool]:
        assert self._meeting is not None
        try:
            return self._meeting.look()
        except RendezvousError as error:
            raise self._host_left(error) from None

    # -- what the cell is told

    def why_again(self, ranks: int) -> str:
        """Say why workers start again although none failed here."""
        if self._num_nodes == self._before:
            return OTHERS_START_AGAIN
        change = "joined" if self._num_nodes > self._before else "lost"
        several = "s" if abs(self._num_nodes - self._before) > 1 else ""
        return f"node{several} {change}: {self.size(ranks)}; workers start again"

    def size(self, ranks: int) -> str:
        """Say how large the run is now."""
        return f"{_counted(self._num_nodes, 'node')}, {_counted(ranks, 'rank')}"

    def shortage(self) -> str:
        """Say that too few nodes are left, empty where they are enough."""
        present, waiting, is_closed = self._look()
        left, least = len(present) + waiting, self._place.min_nodes
        if is_closed or left >= least:
            return ""
        return (
            f"{_counted(left, 'node')} left, at least {least} are needed: "
            f"waiting for others, {self._seconds:g} s at most"
        )

    def _too_few(self) -> str:
        return (
            f"fewer than {_counted(self._place.min_nodes, 'node')} were there after {self._seconds:g} s, "
            f"num_nodes='{self._place.min_nodes}:{self._place.num_nodes}' asks for as many; "
            "rdzv_conf={'join_timeout': seconds} sets how long to wait"
        )

    def _host_left(self, error: BaseException) -> LaunchError:
        self._meeting = None  # whoever leaves now would be told of a broken connection
        reason = str(error.__cause__ or error).partition("\n")[0]
        return LaunchError(
            f"the node that holds the store of the run at {self._host}:{self._port} has left: {reason}"
        )

    # -- the end

    def concluded(self, attempted: Callable[[], Outcome], record: RunRecord) -> Outcome:
        """Run this node's part, and return how the run ended: alike on all nodes that are in it at its end."""
        try:
            outcome = attempted()
        except LaunchError:
            if (cause := self._end_elsewhere()) is None:
                raise
            return by_another(Outcome(), cause)
        if outcome.was_stopped:
            return outcome  # the others go on
        end = end_of(outcome, self._card, is_complete=True)
        if end.kind != "done":
            cause = self._end_elsewhere()
            if cause is not None and (end.follows or not outcome.failures):
                outcome = by_another(outcome, cause)
            elif cause is None:
                self._say_end(end)
        self.set_closed()
        return outcome

    def _say_end(self, end: End) -> None:
        if self._store is not None:
            with contextlib.suppress(DistError):  # who held the store was first
                self._store.set(_END, pickle.dumps(end).hex())

    def _end_elsewhere(self) -> End | None:
        """Return how the run ended on the node that ended it, None where none says."""
        if self._store is None:
            return None
        try:
            end = _loaded(self._store.get(_END)) if self._store.check([_END]) else None
        except DistError:
            return None
        assert end is None or isinstance(end, End)
        return end

    def set_closed(self) -> None:
        """End the run for all: its workers have ended well everywhere, or failed for good here."""
        self._is_closing = True
        if self._meeting is not None:
            with contextlib.suppress(RendezvousError):  # who held the store was first
                self._meeting.set_closed()

    def shutdown(self) -> bool:
        """Leave; the node that holds the store waits for a moment, where the run has ended, until others have left."""
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
            self._store = self._workers_store = self._round = None
        return True


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _loaded(text: bytes) -> Any:
    return pickle.loads(bytes.fromhex(text.decode()))
