"""Where nodes talk: who hears what, by real connections within this process."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest

from notebook_accel import runtime
from notebook_accel.launch.engines.nodes import coordinator
from notebook_accel.launch.engines.nodes.coordinator import Coordinator
from notebook_accel.launch.engines.nodes.messages import CoordinatorConnection, Message, MessageKind
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, Roster, find_disagreements
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.launch.supervise.stop_agreement import Questions
from notebook_accel.trust import proof
from tests.unit.clock import PATIENCE_S, wait_until

TOKEN = bytes(range(32))


class Meeting:
    """A coordinator for three nodes, and connections to it."""

    def __init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.coordinator = Coordinator(
            self.listening, TOKEN, 3, elects=False, before_restart=lambda: None, max_losses=1
        )
        self.connections: list[CoordinatorConnection] = []

    def come(self, rank: int, **same: str) -> CoordinatorConnection:
        connection = CoordinatorConnection("127.0.0.1", self.port, TOKEN, PATIENCE_S)
        self.connections.append(connection)
        connection.say(Message("node", (node(rank, **same), 0, rank == 0)))
        return connection

    def close(self) -> None:
        self.coordinator.close()
        for connection in self.connections:
            connection.close()


def node(rank: int, **same: str) -> NodeInfo:
    return NodeInfo(node_rank=rank, host="one", processes=1, same=same)


def hear(connection: CoordinatorConnection, kind: MessageKind) -> object:
    """Return the value of the next message of a kind."""
    while (message := connection.hear(PATIENCE_S)) is not None:
        if message.kind == kind:
            return message.value
    raise AssertionError(f"no {kind} was heard")


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


def test_a_node_that_was_stopped_before_all_were_there_may_come_again(meeting: Meeting) -> None:
    host, early = meeting.come(0), meeting.come(1)
    wait_until(lambda: len(meeting.coordinator._peers) == 2)
    early.say(Message("outcome", NodeOutcome(node=node(1), kind="stopped", text="node 1 (one) was stopped")))
    early.say(Message("bye"))
    early.close()
    wait_until(lambda: len(meeting.coordinator._peers) == 1)
    connections = [host, meeting.come(1), meeting.come(2)]
    for connection in connections:
        hear(connection, "roster")
    fourth = str(hear(meeting.come(1), "refused"))
    assert fourth.startswith(
        "the run there has its 3 nodes already: node 0 (one), node 1 (one), node 2 (one); "
    )
    for rank, connection in enumerate(connections):
        connection.say(Message("outcome", NodeOutcome(node=node(rank), kind="done")))
    assert [hear(connection, "verdict") for connection in connections] == [None] * 3
    late = meeting.come(1)
    hear(late, "over")


def test_the_ranks_of_all_nodes_stop_at_one_question(meeting: Meeting) -> None:
    """Those of a node that has ended do not count."""
    nodes = [meeting.come(rank) for rank in range(3)]
    for each in nodes:
        hear(each, "roster")
    nodes[1].say(Message("stop"))
    for each in (nodes[0], nodes[2]):
        hear(each, "stop")
    nodes[1].say(Message("held", Questions(3, 4)))
    nodes[2].say(Message("held", Questions(2, 9)))
    nodes[0].say(Message("outcome", NodeOutcome(node=node(0), kind="done")))
    assert [hear(each, "agreed") for each in nodes[1:]] == [Questions(2, 9)] * 2
    for each in nodes:
        each.say(Message("node", (node(nodes.index(each)), 1, each is nodes[0])))
    for each in nodes:
        hear(each, "roster")
    assert not any(peer.questions for peer in meeting.coordinator._members), "those were other workers"


def test_a_node_that_is_gone_is_waited_for_as_often_as_workers_may_start_again(meeting: Meeting) -> None:
    nodes = [meeting.come(rank, torch="2.9") for rank in range(3)]
    for each in nodes:
        hear(each, "roster")
    nodes[1].close()
    for each in (nodes[0], nodes[2]):
        attempt, why = cast(tuple[int, str], hear(each, "again"))
        assert attempt == 1 and why.startswith("node 1 (one) is gone without a word")
        each.say(Message("node", (node(nodes.index(each), torch="2.9"), 1, each is nodes[0])))
    assert "has its 3 nodes already" in str(hear(meeting.come(2), "refused")), "that one is there"
    assert "torch: 2.9 on node 0 (one)" in str(hear(meeting.come(1, torch="2.8"), "refused"))
    nodes[1] = meeting.come(1, torch="2.9")
    rosters = [cast(Roster, hear(each, "roster")) for each in nodes]
    assert [(roster.node_rank, roster.attempt) for roster in rosters] == [(0, 1), (1, 1), (2, 1)]
    nodes[2].close()
    for each in nodes[:2]:
        verdict = cast(NodeOutcome, hear(each, "verdict"))
        assert verdict.kind == "lost" and verdict.node.node_rank == 2, "nobody waits a second time"


def test_a_host_that_is_stopped_tells_those_who_wait(meeting: Meeting) -> None:
    waiting, host = meeting.come(1), meeting.come(0)
    hear(host, "present")
    host.say(Message("outcome", NodeOutcome(node=node(0), kind="stopped", text="node 0 (one) was stopped")))
    assert str(hear(waiting, "refused")).startswith("node 0 (one) was stopped")


def test_a_connection_is_not_lost_as_long_as_a_message_is_not_heard(meeting: Meeting) -> None:
    waiting, host = meeting.come(1), meeting.come(0)
    hear(host, "present")
    host.say(Message("outcome", NodeOutcome(node=node(0), kind="stopped", text="node 0 (one) was stopped")))
    wait_until(lambda: waiting._messages and waiting._messages[-1][0].kind == "refused")
    meeting.coordinator.close()
    waiting._listening.join()
    assert not waiting.is_lost
    hear(waiting, "refused")
    assert waiting.is_lost


def test_a_coordinator_ends_without_complaints(
    meeting: Meeting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes and strangers, silent ones and those that were gone at once, are connected when it closes."""
    monkeypatch.setattr(coordinator, "_PROOF_SECONDS", 3600.0)  # which it does not wait for
    with caplog.at_level(logging.DEBUG, "asyncio"):
        meeting.come(0)
        strangers = [socket.create_connection(("127.0.0.1", meeting.port)) for _ in range(4)]
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
        strangers[1].sendall(bytes(proof.ANSWER_BYTES))
        strangers[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        strangers[2].close()
        wait_until(lambda: len(meeting.coordinator._connections) == 3)  # the node, and two who say nothing
        meeting.coordinator.close()
    for stranger in strangers:
        stranger.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_nodes_that_come_while_a_coordinator_closes_are_let_go() -> None:
    """They are those of the next run at the same place, and would wait for an answer."""
    gc.disable()  # it closes forgotten connections, at some time
    told = 0
    try:
        for _ in range(40):
            listening = socket.create_server(("127.0.0.1", 0))
            coordinator = Coordinator(listening, TOKEN, 2, elects=False, before_restart=lambda: None)
            coming = threading.Thread(target=_come_and_wait, args=(listening.getsockname(), waits := []))
            coming.start()
            time.sleep(0.002)
            coordinator.close()
            coming.join()
            assert not any(waits)
            told += len(waits)
    finally:
        gc.enable()
    assert told, "some were let go by a reset"


def _come_and_wait(where: tuple[str, int], waits: list[bool]) -> None:
    """Connect until nothing listens any more; note for each connection whether it stays open."""
    with contextlib.ExitStack() as stack:
        connections = []
        with contextlib.suppress(OSError):
            for _ in range(20):
                connections.append(stack.enter_context(socket.create_connection(where, 5)))
                connections[-1].sendall(b"x")
        for connection in connections:
            connection.settimeout(PATIENCE_S)
            try:
                while connection.recv(64):
                    pass  # it was greeted
            except TimeoutError:
                waits.append(True)
                return
            except OSError:
                waits.append(False)


def test_no_fork_keeps_what_joins_nodes(meeting: Meeting) -> None:
    host = meeting.come(0)
    hear(host, "present")
    assert {meeting.coordinator, host} <= set(runtime.owners())
    listening, connected = meeting.coordinator.filenos()
    assert listening == meeting.listening.fileno()
    with (
        socket.socket(fileno=os.dup(connected)) as ours,
        socket.socket(fileno=os.dup(*host.filenos())) as its,
    ):
        assert ours.getpeername() == its.getsockname()
    meeting.close()
    assert not {meeting.coordinator, host} & set(runtime.owners())
    assert meeting.coordinator.filenos() == host.filenos() == []


def test_nodes_of_one_name_may_disagree() -> None:
    """Machines of a cloud are often called alike, and nobody has a rank before all are there."""
    (line,) = find_disagreements([node(0, torch="2.9"), node(0, torch="2.8")], complete=True)
    assert line == "torch: 2.9 on node 0 (one); 2.8 on node 0 (one)"
