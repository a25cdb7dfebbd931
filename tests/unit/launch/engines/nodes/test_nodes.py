"""Nodes that meet, come and go, and wait for each other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines import stores
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.nodes.coordinator import Coordinator
from notebook_accel.launch.engines.nodes.meeting import NodeRendezvous
from notebook_accel.launch.engines.nodes.outcomes import RestartCause
from notebook_accel.launch.job import Job, Rendezvous
from notebook_accel.launch.supervise.control import Control, StopAsked
from tests.ports import free_port
from tests.unit.clock import PATIENCE_S
from tests.unit.jobs import make_job

WELL = Outcome()


def finish(node: NodeRendezvous) -> Outcome | None:
    """Say that the workers of a node have ended well; return how the run ended, None where it goes on."""
    return node.finish(WELL, None, is_complete=True)


def place(**more: object) -> Rendezvous:
    return Rendezvous(**{"address": "127.0.0.1", "port": free_port(), **more})  # type: ignore[arg-type]


def job(where: Rendezvous, **more: Any) -> Job:
    return make_job(len, distributed=True, rendezvous=where, **{"returns": "all", **more})


class Asking(Control):
    """Says when to stop as a function says."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask

    def check(self) -> None:
        self._ask()


def make(
    made: Job, ask: Callable[[], None] = lambda: None, tell: Callable[[str], Any] = lambda text: None
) -> NodeRendezvous:
    return NodeRendezvous(made, Asking(ask), tell)


def is_called(node: NodeRendezvous) -> bool:
    node.hear_all()
    return node.is_called


def test_a_node_that_is_enough_begins_however_short_it_waits_for_others(port: int) -> None:
    where = place(port=port, num_nodes=2, min_nodes=1, backend="c10d", settings={"join_timeout": 0.5})
    nodes = make(job(where))
    try:
        assert nodes.meet().num_nodes == 1
    finally:
        nodes.leave()


def test_nodes_that_do_not_fit_are_turned_away_and_shown_a_few_times(port: int) -> None:
    settings = {"join_timeout": PATIENCE_S, "last_call_timeout": 0.1}
    common = {"port": port, "num_nodes": 3, "min_nodes": 1, "backend": "c10d", "settings": settings}
    told = list[str]()
    host = make(job(place(node_rank=0, **common)), tell=told.append)
    host.meet()
    try:
        for _ in range(40):
            guest = make(job(place(node_rank=1, **common), max_restarts=3))
            with pytest.raises(LaunchError, match=r"max_restarts: 0 on node 0 \(.*\); 3 on a new node"):
                guest.meet()
            guest.leave()
        end = time.monotonic() + PATIENCE_S
        while len(told) < 32 and time.monotonic() < end:
            assert not is_called(host)
        assert len(told) == 32 and "was not let into the run" in told[0]
    finally:
        host.leave()


def test_nodes_join_and_leave(port: int) -> None:
    """Those that are there meet again each time; nobody is let in once workers have ended well."""
    settings = {"join_timeout": PATIENCE_S, "last_call_timeout": 0.1}
    common = {"port": port, "num_nodes": 3, "min_nodes": 1, "backend": "c10d", "settings": settings}
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise StopAsked

    nodes = [make(job(place(node_rank=min(rank, 1), **common)), check) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:

        def meet(*ranks: int) -> list[tuple[int, int]]:
            found = [pool.submit(nodes[rank].meet) for rank in ranks]
            return [(each.result(PATIENCE_S).node_rank, each.result().num_nodes) for each in found]

        def wait_for_news(rank: int) -> None:
            end = time.monotonic() + PATIENCE_S
            while not is_called(nodes[rank]) and time.monotonic() < end:
                time.sleep(0.01)

        assert meet(0) == [(0, 1)]
        joining = pool.submit(nodes[1].meet)
        wait_for_news(0)
        assert meet(0) == [(0, 2)] and joining.result(PATIENCE_S).node_rank == 1
        assert nodes[0].explain_restart(4) == "node joined: 2 nodes, 4 ranks; workers start again"
        assert nodes[1].attempt == nodes[0].attempt == 1 and nodes[1].num_missed == 0
        nodes[1].leave()
        wait_for_news(0)
        assert meet(0) == [(0, 1)]
        assert nodes[0].explain_restart(2) == "node lost: 1 node, 2 ranks; workers start again"
        assert finish(nodes[0]) is WELL
        late = pool.submit(nodes[2].meet)
        time.sleep(0.5)
        assert not is_called(nodes[0]) and not late.done()
        nodes[0].leave()
        stopped.set()
        with pytest.raises(StopAsked):
            late.result(PATIENCE_S)
        nodes[2].leave()


def test_a_node_that_is_lost_while_others_have_ended_well_ends_no_run(port: int) -> None:
    """Those that ended meet again; a spare takes the place of the lost one."""
    settings = {"join_timeout": PATIENCE_S, "last_call_timeout": 0.1}
    common = {"port": port, "num_nodes": 2, "min_nodes": 2, "backend": "c10d", "settings": settings}
    nodes = [make(job(place(node_rank=min(rank, 1), **common))) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = [pool.submit(nodes[rank].meet) for rank in (0, 1)]
        assert [each.result(PATIENCE_S).num_nodes for each in first] == [2, 2]
        spare = pool.submit(nodes[2].meet)
        ending = pool.submit(finish, nodes[0])
        time.sleep(0.5)
        assert not spare.done() and not ending.done(), "there is no room for it"
        nodes[1].leave()
        assert ending.result(PATIENCE_S) is None, "it is called again"
        again = pool.submit(nodes[0].meet)
        assert [each.result(PATIENCE_S).num_nodes for each in (again, spare)] == [2, 2]
        ends = [pool.submit(finish, nodes[rank]) for rank in (0, 2)]
        assert [each.result(PATIENCE_S) for each in ends] == [WELL, WELL]
        for rank in (2, 0):
            nodes[rank].leave()


def test_a_stop_of_the_node_with_the_coordinator_reaches_the_others_on_a_busy_machine(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    take = Coordinator._take

    def take_late(self: Coordinator, peer: Any, message: Any) -> None:
        if message is not None and message.kind == "outcome":
            time.sleep(1.0)  # meanwhile this node leaves
        take(self, peer, message)

    def stop_where_one_is_there() -> None:
        if any("waits for node 2 (" in text for text in said):
            raise StopAsked

    monkeypatch.setattr(Coordinator, "_take", take_late)
    nodes = [make(job(place(port=port, num_nodes=3, node_rank=1)))]
    nodes.insert(0, make(job(place(port=port, num_nodes=3)), stop_where_one_is_there, said.append))

    def lead() -> None:
        try:
            nodes[0].meet()
        except StopAsked as error:
            nodes[0].give_up(error)
            raise
        finally:
            nodes[0].leave()

    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(lead)
        joining = pool.submit(nodes[1].meet)
        with pytest.raises(LaunchError, match="was stopped, which holds the run together"):
            joining.result(2 * PATIENCE_S)
        nodes[1].leave()
        with pytest.raises(StopAsked):
            leading.result(PATIENCE_S)


def test_of_many_missing_nodes_some_are_named() -> None:
    nodes = make(job(place(num_nodes=10**12)))
    assert nodes._describe_missing([]).endswith(f"node 7 (rank 7), {10**12 - 8} more nodes")


def test_a_store_that_cannot_be_made_keeps_no_port(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("too many files")

    monkeypatch.setattr(stores, "TCPStore", fail)
    with pytest.raises(LaunchError, match="too many files"):
        stores.open_store(place(port=port, num_nodes=2))
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("least", [3, 0], ids=["come and go", "fixed"])
def test_all_nodes_are_told_why_the_workers_start_again(least: int, port: int) -> None:
    """One that lost a peer meets the others again before the node with the cause has told it."""
    common = {"port": port, "num_nodes": 3, "min_nodes": least}
    nodes = [make(job(place(node_rank=rank, **common))) for rank in range(3)]
    failed, follows = RestartCause(text="ValueError"), RestartCause(text="connection closed", follows=True)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda node: node.meet(), nodes))
        for attempt in range(2):
            nodes[2].share_cause(follows)
            early = pool.submit(nodes[2].meet)
            end = time.monotonic() + PATIENCE_S
            while not is_called(nodes[0]) and time.monotonic() < end:
                time.sleep(0.01)
            late = [pool.submit(nodes[0].meet)]
            if not attempt:
                nodes[1].share_cause(failed)
            late.append(pool.submit(nodes[1].meet))
            for each in (early, *late):
                each.result(2 * PATIENCE_S)
            said = [node.explain_restart(3).partition("): ")[2] for node in nodes]
            expected = ["ValueError", "connection closed", "ValueError"]
            assert said == (["connection closed"] * 2 + [""] if attempt else expected)
        list(pool.map(lambda node: node.leave(), nodes))
