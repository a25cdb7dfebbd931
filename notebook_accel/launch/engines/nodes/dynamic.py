"""Torch elastic's dynamic rendezvous, changed for nodes whose clocks differ and that may leave.

Torch writes the state as a pickle into the store, where anybody may write. Here the store has data, and pickles go no
further than to torch's handler in this process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _NodeDesc,
    _RendezvousExitOp,
    _RendezvousState,
)

from ....trust.plain import MalformedError
from ....trust.secret import OPEN, Trust
from .node_store import AnyStore

_DEADLINE = "the deadline"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_NO_STATE = b"no state"
_LAST_ROUND = 1 << 31
_Node = tuple[str, int, int]


class _Time(NamedTuple):
    """A time that a node wrote to the store.

    Attributes:
        written: the time as it stands in the store, by that node's clock.
        local: when this node saw it first, by its own clock.
    """

    written: datetime
    local: datetime


@dataclass(frozen=True, kw_only=True)
class _StoredState:
    """Torch's `_RendezvousState` as it stands in the store, with times in microseconds since the epoch."""

    round: int
    complete: bool
    deadline: int | None
    closed: bool
    participants: Sequence[tuple[_Node, int]]
    wait_list: Sequence[_Node]
    redundancy_list: Sequence[_Node]
    beats: Sequence[tuple[_Node, int]]

    def __post_init__(self) -> None:
        ranks = {rank for _, rank in self.participants}  # with gaps, where a node has left
        is_wrong = len(ranks) < len(self.participants) or any(rank < 0 for rank in ranks)
        if not 0 <= self.round <= _LAST_ROUND or (self.complete and is_wrong):
            raise ValueError(f"round {self.round} of nodes with the ranks {sorted(ranks)[:9]}")


class Backend(C10dRendezvousBackend):
    """Torch's backend, for nodes whose clocks differ.

    Torch compares its own clock with times that other nodes wrote by theirs. So a node whose clock is some seconds late
    counts as lost. Here a time counts from when this node saw it first. In the store it stays as it was written.

    What no node of the run wrote counts as nothing: this node goes on with the last state that it knows, and writes it
    over that.

    Args:
        store: where the nodes meet.
        run_id: name of the run.
        last_call: how long nodes wait for further ones, once they are enough.
        trust: whether nodes prove a secret.
        run_token: of this run alone: a state of an earlier one counts as nothing.

    Attributes:
        check: called at each look at the store; its exception ends the wait of the one who looks.
    """

    check: Callable[[], None] | None = None

    def __init__(
        self,
        store: AnyStore,
        run_id: str,
        last_call: timedelta,
        trust: Trust = OPEN,
        run_token: str = "",
    ) -> None:
        super().__init__(store, run_id)  # type: ignore[arg-type]
        self._name = f"{run_token} {self._key}"
        self._last_call = last_call
        self._trust = trust
        self._times: dict[Any, _Time] = {}
        self._last = _RendezvousState()

    def get_state(self) -> tuple[bytes, Any] | None:
        if self.check is not None:
            self.check()
        return self._read(self._call_store("get", self._key))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        # torch hands over a pickle that it has made in this process, and is given one
        written, own = self._use_written_times(pickle.loads(state))
        entry = self._trust.write(self._name, _StoredState, written)
        before = token.decode() if isinstance(token, bytes) else self._NULL_SENTINEL
        present = self._call_store("compare_set", self._key, before, entry)
        is_ours = present == entry.encode()
        if is_ours:  # else another node was first: what is here has to be written again
            self._times |= own
        found = self._read(present)
        return None if found is None else (*found, is_ours)

    def _read(self, entry: bytes) -> tuple[bytes, bytes] | None:
        """Return the state of an entry, and the entry, which the next one is to replace."""
        if entry == self._NULL_SENTINEL.encode():
            return None
        try:
            self._last = self._use_local_times(self._trust.read(self._name, _StoredState, entry))
        except (MalformedError, OverflowError):  # a stranger wrote it
            if not entry.isascii():  # which `compare_set` could not replace
                entry = _NO_STATE
                self._call_store("set", self._key, entry.decode())
        return pickle.dumps(self._last), entry

    def _use_local_times(self, stored: _StoredState) -> _RendezvousState:
        """Return a state of the store with times by this node's clock."""
        now = datetime.now(timezone.utc)
        state = _RendezvousState()
        state.round, state.complete, state.closed = stored.round, stored.complete, stored.closed
        state.participants = {_NodeDesc(*node): rank for node, rank in stored.participants}
        state.wait_list = {_NodeDesc(*node) for node in stored.wait_list}
        state.redundancy_list = {_NodeDesc(*node) for node in stored.redundancy_list}
        beats = {_NodeDesc(*node): _EPOCH + beat * _MICROSECOND for node, beat in stored.beats}
        state.last_heartbeats = {node: self._find_local(node, beat, now) for node, beat in beats.items()}
        if stored.deadline is not None:
            deadline = _EPOCH + stored.deadline * _MICROSECOND
            state.deadline = self._find_local(_DEADLINE, deadline, now + self._last_call)
        return state

    def _find_local(self, name: Any, written: datetime, local: datetime) -> datetime:
        """Return when this node saw a time first; `local` where that is now."""
        known = self._times.get(name)
        if known is None or known.written != written:
            known = self._times[name] = _Time(written, local)
        return known.local

    def _use_written_times(self, state: _RendezvousState) -> tuple[_StoredState, dict[Any, _Time]]:
        """Return a state with times as their nodes wrote them, and the times that this node writes itself."""
        own: dict[Any, _Time] = {}

        def find_written(name: Any, time: datetime) -> int:
            known = self._times.get(name)
            if known is not None and known.local == time:
                return (known.written - _EPOCH) // _MICROSECOND
            own[name] = _Time(time, time)
            return (time - _EPOCH) // _MICROSECOND

        stored = _StoredState(
            round=state.round,
            complete=state.complete,
            deadline=None if state.deadline is None else find_written(_DEADLINE, state.deadline),
            closed=state.closed,
            participants=[(_describe(node), rank) for node, rank in state.participants.items()],
            wait_list=sorted(map(_describe, state.wait_list)),
            redundancy_list=sorted(map(_describe, state.redundancy_list)),
            beats=[
                (_describe(node), find_written(node, beat)) for node, beat in state.last_heartbeats.items()
            ],
        )
        return stored, own


def _describe(node: _NodeDesc) -> _Node:
    return node.addr, node.pid, node.local_id


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
