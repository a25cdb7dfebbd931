"""Torch elastic's dynamic rendezvous, with what nodes that come and go need besides."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from torch.distributed import Store
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousExitOp,
)

_DEADLINE = "the deadline"


class _Seen(NamedTuple):
    told: datetime
    here: datetime


class Backend(C10dRendezvousBackend):
    """Torch's, for nodes whose clocks differ; it looks now and then whether somebody asked the run to stop.

    Torch compares the time of day with what other nodes wrote by theirs, and takes a node for lost whose clock is some
    seconds late. Here a time counts from when this node saw it change, and stands in the store as it was written.

    Args:
        store: where the nodes meet.
        run_id: of the run.
        last_call: how long those who are enough wait for others.
    """

    check: Callable[[], None] | None = None

    def __init__(self, store: Store, run_id: str, last_call: timedelta) -> None:
        super().__init__(store, run_id)
        self._last_call = last_call
        self._seen: dict[Any, _Seen] = {}

    def get_state(self) -> tuple[bytes, Any] | None:
        if self.check is not None:
            self.check()
        found = super().get_state()
        return None if found is None else (self._as_here(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        told, own = self._as_told(state)
        found = super().set_state(told, token)
        if found is None:
            return None
        if found[2]:  # else another node was first: what is here has to be written again
            self._seen |= own
        return self._as_here(found[0]), *found[1:]

    def _as_here(self, told: bytes) -> bytes:
        state = pickle.loads(told)
        now = datetime.now(timezone.utc)
        for node, beat in state.last_heartbeats.items():
            state.last_heartbeats[node] = self._noted(node, beat, now)
        if state.deadline is not None:
            state.deadline = self._noted(_DEADLINE, state.deadline, now + self._last_call)
        return pickle.dumps(state)

    def _noted(self, name: Any, told: datetime, here: datetime) -> datetime:
        seen = self._seen.get(name)
        if seen is None or seen.told != told:
            seen = self._seen[name] = _Seen(told, here)
        return seen.here

    def _as_told(self, here: bytes) -> tuple[bytes, dict[Any, _Seen]]:
        """Return a state with times as their nodes wrote them, and those that are this node's own."""
        state = pickle.loads(here)
        own: dict[Any, _Seen] = {}

        def told(name: Any, time: datetime) -> datetime:
            seen = self._seen.get(name)
            if seen is not None and seen.here == time:
                return seen.told
            own[name] = _Seen(time, time)
            return time

        for node, beat in state.last_heartbeats.items():
            state.last_heartbeats[node] = told(node, beat)
        if state.deadline is not None:
            state.deadline = told(_DEADLINE, state.deadline)
        return pickle.dumps(state), own


class Meeting(DynamicRendezvousHandler):
    """Torch's handler, which lets others see who is there, and can leave without closing the run."""

    @property
    def size(self) -> int:
        """How many nodes have come to the meeting that is under way."""
        return len(self._state_holder.state.participants)

    @property
    def round(self) -> int:
        """How often the nodes have met before."""
        return int(self._state_holder.state.round)

    def meet(self, store: Any, check: Callable[[], None]) -> RendezvousInfo:
        """Meet the others; `check` is called now and then."""
        # torch would open a store for the workers, see ElasticNodes
        self._shared_tcp_store_server = store
        self._bootstrap_store_info = RendezvousStoreInfo(master_addr="", master_port=0)
        backend = self._state_holder._backend  # type: ignore[attr-defined]
        backend.check = check
        try:
            return self.next_rendezvous()
        finally:
            backend.check = None

    def look(self, fresh: bool = False) -> tuple[set[int], int, bool]:
        """Return who is there, how many wait to come in, and whether the run has ended; a second old at most."""
        if fresh:
            self._state_holder._last_sync_time = -1  # type: ignore[attr-defined]
        waiting = self.num_nodes_waiting()
        state = self._state_holder.state
        return set(state.participants.values()), waiting, bool(state.closed)

    def leave(self) -> None:
        """Leave the run."""
        self._stop_heartbeats()
        with self._heartbeat_lock:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.close))
