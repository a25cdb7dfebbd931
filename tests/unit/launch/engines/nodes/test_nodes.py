"""Nodes that meet: clocks that differ, and waits."""

from __future__ import annotations

import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.nodes import elastic, stores
from notebook_accel.launch.engines.nodes.dynamic import Backend
from notebook_accel.launch.engines.nodes.elastic import ElasticNodes
from notebook_accel.launch.engines.nodes.fixed import FixedNodes
from notebook_accel.launch.engines.nodes.outcomes import RestartCause
from notebook_accel.launch.job import Job, Rendezvous
from notebook_accel.launch.supervise.control import StopAsked
from notebook_accel.stream.record import RunRecord
from tests.ports import free_port
from tests.unit.clock import PATIENCE_S
from tests.unit.jobs import make_job

LAST_CALL = timedelta(minutes=1)
LATE, RIGHT = _NodeDesc("late", 1, 0), _NodeDesc("right", 2, 0)
Beats = dict[_NodeDesc, datetime]


def now() -> datetime:
    return datetime.now(timezone.utc)


def state_of(backend: Backend) -> _RendezvousState:
    found = backend.get_state()
    assert found is not None
    return pickle.loads(found[0])


def told(backend: Backend, beats: Beats, deadline: datetime | None = None) -> None:
    """Write a state, as torch's handler does."""
    found = backend.get_state()
    state = _with(_RendezvousState(), beats)
    state.deadline = deadline
    answer = backend.set_state(pickle.dumps(state), None if found is None else found[1])
    assert answer is not None and answer[2], "it was written"


def _with(state: _RendezvousState, beats: Beats) -> _RendezvousState:
    state.last_heartbeats = beats
    return state


def test_clocks_of_nodes_may_differ() -> None:
    """A node counts as lost where it says nothing new, whatever time it has."""
    store = HashStore()
    late, right = Backend(store, "run", LAST_CALL), Backend(store, "run", LAST_CALL)
    hour = timedelta(hours=1)
    beat = now() - hour
    told(late, {LATE: beat}, beat + LAST_CALL)
    first = state_of(right)
    assert now() - first.last_heartbeats[LATE] < timedelta(minutes=5)
    assert first.deadline is not None and timedelta() < first.deadline - now() <= LAST_CALL
    assert state_of(right).last_heartbeats == first.last_heartbeats, "nothing new was said"

    own = now()
    told(right, {**first.last_heartbeats, RIGHT: own}, first.deadline)
    second = state_of(late)
    assert second.last_heartbeats[LATE] == beat and second.deadline == beat + LAST_CALL, "as it wrote them"
    told(late, {**second.last_heartbeats, LATE: beat + LAST_CALL}, None)
    state, token = late.get_state() or (b"", b"")
    told(right, {**state_of(right).last_heartbeats, RIGHT: own + LAST_CALL})
    beats = {**second.last_heartbeats, LATE: beat + 2 * LAST_CALL}
    answer = late.set_state(pickle.dumps(_with(pickle.loads(state), beats)), token)
    assert answer is not None and not answer[2], "another node was first"
    assert pickle.loads(answer[0]).last_heartbeats[LATE] == beat + LAST_CALL, "to be written again"
    third = state_of(right)
    assert third.last_heartbeats[LATE] > first.last_heartbeats[LATE] and third.deadline is None
    assert third.last_heartbeats[RIGHT] == own + LAST_CALL


def place(**more: object) -> Rendezvous:
    return Rendezvous(**{"address": "127.0.0.1", "port": free_port(), **more})  # type: ignore[arg-type]


def job(where: Rendezvous) -> Job:
    return make_job(now, distributed=True, rendezvous=where)


def test_a_node_that_is_enough_begins_however_short_it_waits_for_others(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_ROUND_SECONDS", PATIENCE_S)  # what torch needs, on a busy machine too
    where = place(port=port, num_nodes=2, min_nodes=1, backend="c10d", settings={"join_timeout": 0.5})
    nodes = ElasticNodes(job(where))
    try:
        assert nodes.next_rendezvous().world_size == 1
    finally:
        nodes.shutdown()


def test_a_stop_of_the_node_that_holds_the_store_reaches_the_others_on_a_busy_machine(port: int) -> None:
    nodes = [FixedNodes(job(place(port=port, num_nodes=3, node_rank=rank))) for rank in range(2)]
    said: list[str] = []

    def stop_where_one_is_there() -> None:
        if any("waits for node 2 (" in text for text in said):
            raise StopAsked

    def tell(text: str) -> None:
        said.append(text)
        coordinator = nodes[0]._coordinator
        assert coordinator is not None and coordinator._loop is not None
        # meanwhile this node says that it was stopped, and leaves
        coordinator._loop.call_soon_threadsafe(time.sleep, 1.0)

    nodes[0].tell, nodes[0].check = tell, stop_where_one_is_there

    def lead() -> None:
        try:
            nodes[0].conclude(nodes[0].next_rendezvous, RunRecord())  # type: ignore[arg-type]
        finally:
            nodes[0].shutdown()

    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(lead)
        joining = pool.submit(nodes[1].next_rendezvous)
        with pytest.raises(LaunchError, match="was stopped, which holds the run together"):
            joining.result(2 * PATIENCE_S)
        nodes[1].shutdown()
        with pytest.raises(StopAsked):
            leading.result(PATIENCE_S)


def test_of_many_missing_nodes_some_are_named() -> None:
    nodes = FixedNodes(job(place(num_nodes=10**12)))
    assert nodes._describe_missing([]).endswith(f"node 7 (rank 7), {10**12 - 8} more nodes")


def test_a_store_that_cannot_be_made_keeps_no_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("too many files")

    monkeypatch.setattr(stores, "TCPStore", fail)
    with pytest.raises(RuntimeError):
        stores.open_for_nodes("127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


FIXED_AGAIN = pytest.param(
    FixedNodes,
    marks=pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch cannot start them again"),
)


@pytest.mark.parametrize("kind", [ElasticNodes, FIXED_AGAIN])
def test_all_nodes_are_told_why_the_workers_start_again(
    kind: type[ElasticNodes] | type[FixedNodes], port: int
) -> None:
    """One that lost a peer meets the others again before the node with the cause has told it."""
    settings = {"keep_alive_interval": PATIENCE_S}  # no node is lost
    common = {"port": port, "num_nodes": 3, "min_nodes": 3, "settings": settings}
    nodes = [kind(job(place(node_rank=rank, **common))) for rank in range(3)]
    failed, follows = RestartCause(text="ValueError"), RestartCause(text="connection closed", follows=True)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda node: node.next_rendezvous(), nodes))
        for attempt in range(2):
            nodes[2].share_cause(follows)
            early = pool.submit(nodes[2].next_rendezvous)
            end = time.monotonic() + PATIENCE_S
            while not nodes[0].num_nodes_waiting() and time.monotonic() < end:
                time.sleep(0.01)
            late = [pool.submit(nodes[0].next_rendezvous)]
            if not attempt:
                nodes[1].share_cause(failed)
            late.append(pool.submit(nodes[1].next_rendezvous))
            for each in (early, *late):
                each.result(2 * PATIENCE_S)
            said = [node.explain_restart(3).partition("): ")[2] for node in nodes]
            expected = ["ValueError", "connection closed", "ValueError"]
            assert said == (["connection closed"] * 2 + [""] if attempt else expected)
        for node in nodes:
            node.set_closed()
        list(pool.map(lambda node: node.shutdown(), nodes))
