"""Torch elastic's dynamic rendezvous, changed for nodes whose clocks differ and that may leave."""

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


class _Time(NamedTuple):
    """A time that a node wrote to the store.

    Attributes:
        written: the time as it stands in the store, by that node's clock.
        local: when this node saw it first, by its own clock.
    """

    written: datetime
    local: datetime


class Backend(C10dRendezvousBackend):
    """Torch's backend, for nodes whose clocks differ.

    Torch compares its own clock with times that other nodes wrote by theirs. So a node whose clock is some seconds late
    counts as lost. Here a time counts from when this node saw it first. In the store it stays as it was written.

    Args:
        store: where the nodes meet.
        run_id: name of the run.
        last_call: how long nodes wait for further ones, once they are enough.

    Attributes:
        check: called at each look at the store; its exception ends the wait of the one who looks.
    """

    check: Callable[[], None] | None = None

    def __init__(self, store: Store, run_id: str, last_call: timedelta) -> None:
        super().__init__(store, run_id)
        self._last_call = last_call
        self._times: dict[Any, _Time] = {}

    def get_state(self) -> tuple[bytes, Any] | None:
        if self.check is not None:
            self.check()
        found = super().get_state()
        return None if found is None else (self._use_local_times(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        written, own = self._use_written_times(state)
        found = super().set_state(written, token)
        if found is None:
            return None
        if found[2]:  # else another node was first: what is here has to be written again
            self._times |= own
        return self._use_local_times(found[0]), *found[1:]

    def _use_local_times(self, written: bytes) -> bytes:
        """Return a state of the store with times by this node's clock."""
        state = pickle.loads(written)
        now = datetime.now(timezone.utc)
        for node, beat in state.last_heartbeats.items():
            state.last_heartbeats[node] = self._find_local(node, beat, now)
        if state.deadline is not None:
            state.deadline = self._find_local(_DEADLINE, state.deadline, now + self._last_call)
        return pickle.dumps(state)

    def _find_local(self, name: Any, written: datetime, local: datetime) -> datetime:
        """Return when this node saw a time first; `local` where that is now."""
        known = self._times.get(name)
        if known is None or known.written != written:
            known = self._times[name] = _Time(written, local)
        return known.local

    def _use_written_times(self, local: bytes) -> tuple[bytes, dict[Any, _Time]]:
        """Return a state with times as their nodes wrote them, and the times that this node writes itself."""
        state = pickle.loads(local)
        own: dict[Any, _Time] = {}

        def find_written(name: Any, time: datetime) -> datetime:
            known = self._times.get(name)
            if known is not None and known.local == time:
                return known.written
            own[name] = _Time(time, time)
            return time

        for node, beat in state.last_heartbeats.items():
            state.last_heartbeats[node] = find_written(node, beat)
        if state.deadline is not None:
            state.deadline = find_written(_DEADLINE, state.deadline)
        return pickle.dumps(state), own


class DynamicRendezvous(DynamicRendezvousHandler):
    """Torch's handler; besides, it shows who is there, and leaves without closing the run."""

    @property
    def size(self) -> int:
        """How many nodes have come to the meeting that is under way."""
        return len(self._state_holder.state.participants)

    @property
    def round(self) -> int:
        """How often the nodes have met before."""
        return int(self._state_holder.state.round)

    def meet(self, store: Any, check: Callable[[], None]) -> RendezvousInfo:
        """Meet the other nodes.

        Args:
            store: where the nodes meet.
            check: called now and then; its exception ends the wait.
        """
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
        """Return who is there, how many wait to come in, and whether the run has ended.

        Args:
            fresh: whether to ask the store now; else the answer may be a second old.
        """
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
