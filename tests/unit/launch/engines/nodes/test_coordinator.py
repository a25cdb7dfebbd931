"""Where nodes talk: who hears what, by real connections within this process."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from notebook_accel import runtime
from notebook_accel.launch.engines.nodes import coordinator, link, messages
from notebook_accel.launch.engines.nodes.coordinator import Coordinator
from notebook_accel.launch.engines.nodes.link import NodeLink
from notebook_accel.launch.engines.nodes.messages import Message, MessageKind
from notebook_accel.launch.engines.nodes.node_info import NodeInfo, Roster, find_disagreements
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.launch.job import Rendezvous
from notebook_accel.launch.supervise.stop_agreement import Questions
from notebook_accel.trust import proof
from notebook_accel.trust.secret import Trust
from tests.unit.clock import PATIENCE_S, wait_until

CLAIM = 4711


class Node:
    """A node's end of a connection to a coordinator."""

    def __init__(self, port: int, trust: Trust, claim: int = 0) -> None:
        self.inbox: queue.SimpleQueue[tuple[NodeLink, Message | None]] = queue.SimpleQueue()
        connection, session = link.connect("127.0.0.1", port, trust, PATIENCE_S, claim)
        self.link = NodeLink(connection, session, self.inbox, messages.NO_LIMIT)
        self.link.start()

    def say(self, kind: MessageKind, value: Any = None, *parts: bytes) -> None:
        self.link.say(Message(kind, value, parts))

    def hear(self, kind: MessageKind) -> Any:
        """Return the value of the next message of a kind."""
        while (message := self.inbox.get(timeout=PATIENCE_S)[1]) is not None:
            if message.kind == kind:
                return message.value
        raise AssertionError(f"no {kind} was heard")

    def close(self) -> None:
        self.link.close(PATIENCE_S)


class Meeting:
    """A coordinator, and connections to it."""

    def __init__(
        self,
        count: int = 3,
        trust: Trust | None = None,
        *,
        least: int = 0,
        backend: str = "static",
        **more: Any,
    ) -> None:
        self.trust = trust or Trust()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        place = Rendezvous(
            port=self.port, num_nodes=count, min_nodes=least, backend=backend, trust=self.trust
        )
        self.coordinator = Coordinator(self.listening, place, CLAIM, **more)
        self.nodes: list[Node] = []

    def connect(self, claim: int = 0) -> Node:
        self.nodes.append(Node(self.port, self.trust, claim))
        return self.nodes[-1]

    def come(self, rank: int, **same: str) -> Node:
        made = self.connect(0 if rank else CLAIM)
        made.say("node", (node(rank, **same), 0))
        return made

    def close(self) -> None:
        self.coordinator.close()
        for each in self.nodes:
            each.close()


def node(rank: int, **same: str) -> NodeInfo:
    return NodeInfo(node_rank=rank, host="one", processes=1, same=same)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting(max_losses=1)
    yield made
    made.close()


def test_a_node_that_was_stopped_before_all_were_there_may_come_again(meeting: Meeting) -> None:
    host, early = meeting.come(0), meeting.come(1)
    wait_until(lambda: len(meeting.coordinator._peers) == 2)
    early.say("outcome", NodeOutcome(node=node(1), kind="stopped", text="node 1 (one) was stopped"))
    early.close()
    wait_until(lambda: len(meeting.coordinator._peers) == 1)
    nodes = [host, meeting.come(1), meeting.come(2)]
    for each in nodes:
        each.hear("roster")
    fourth = str(meeting.come(1).hear("refused"))
    assert fourth.startswith(
        "the run there has its 3 nodes already: node 0 (one), node 1 (one), node 2 (one); "
    )
    for rank, each in enumerate(nodes):
        each.say("outcome", NodeOutcome(node=node(rank), kind="done"))
    assert [each.hear("verdict") for each in nodes] == [None] * 3
    late = meeting.come(1)
    late.hear("over")


def test_the_ranks_of_all_nodes_stop_at_one_question(meeting: Meeting) -> None:
    """Those of a node that has ended do not count."""
    nodes = [meeting.come(rank) for rank in range(3)]
    for each in nodes:
        each.hear("roster")
    nodes[1].say("stop")
    for each in (nodes[0], nodes[2]):
        each.hear("stop")
    nodes[1].say("held", Questions(3, 4))
    nodes[2].say("held", Questions(2, 9))
    nodes[0].say("outcome", NodeOutcome(node=node(0), kind="done"))
    assert [each.hear("agreed") for each in nodes[1:]] == [Questions(2, 9)] * 2
    for each in nodes:
        each.say("node", (node(nodes.index(each)), 1))
    for each in nodes:
        each.hear("roster")
    assert not any(peer.questions for peer in meeting.coordinator._members), "those were other workers"


def test_a_node_that_is_gone_is_waited_for_as_often_as_workers_may_start_again(meeting: Meeting) -> None:
    nodes = [meeting.come(rank, torch="2.9") for rank in range(3)]
    for each in nodes:
        each.hear("roster")
    nodes[1].close()
    for each in (nodes[0], nodes[2]):
        attempt, why = cast(tuple[int, str], each.hear("again"))
        assert attempt == 1 and why.startswith("node 1 (one) is gone without a word")
        each.say("node", (node(nodes.index(each), torch="2.9"), 1))
    assert "has its 3 nodes already" in str(meeting.come(2).hear("refused")), "that one is there"
    assert "torch: 2.9 on node 0 (one)" in str(meeting.come(1, torch="2.8").hear("refused"))
    nodes[1] = meeting.come(1, torch="2.9")
    rosters = [cast(Roster, each.hear("roster")) for each in nodes]
    assert [(roster.node_rank, roster.attempt) for roster in rosters] == [(0, 1), (1, 1), (2, 1)]
    nodes[2].close()
    for each in nodes[:2]:
        verdict = cast(NodeOutcome, each.hear("verdict"))
        assert verdict.kind == "lost" and verdict.node.node_rank == 2, "nobody waits a second time"


def test_a_host_that_is_stopped_tells_those_who_wait(meeting: Meeting) -> None:
    waiting, host = meeting.come(1), meeting.come(0)
    host.hear("present")
    host.say("outcome", NodeOutcome(node=node(0), kind="stopped", text="node 0 (one) was stopped"))
    assert str(waiting.hear("refused")).startswith("node 0 (one) was stopped")


def test_what_was_said_is_heard_before_the_end_of_the_connection(meeting: Meeting) -> None:
    waiting, host = meeting.come(1), meeting.come(0)
    host.hear("present")
    host.say("outcome", NodeOutcome(node=node(0), kind="stopped", text="node 0 (one) was stopped"))
    wait_until(lambda: meeting.coordinator._is_over)
    meeting.coordinator.close()
    waiting.hear("refused")
    assert waiting.inbox.get(timeout=PATIENCE_S) == (waiting.link, None)


def test_a_coordinator_ends_however_many_are_connected(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes and strangers, silent ones and those that were gone at once."""
    monkeypatch.setattr(coordinator, "_PROOF_SECONDS", 3600.0)  # which it does not wait for
    meeting.come(0)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", meeting.port))) for _ in range(4)
        ]
        strangers[0].sendall(b"GET / HTTP/1.0\r\n\r\n")
        strangers[1].sendall(bytes(proof.ANSWER_BYTES))
        strangers[2].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        strangers[2].close()
        wait_until(lambda: len(meeting.coordinator._strangers) == 2)  # who say nothing
        meeting.coordinator.close()
        assert not meeting.coordinator._strangers


@pytest.mark.parametrize("beats", [0.1, 3600.0], ids=["it speaks", "it does not"])
def test_a_node_that_says_nothing_any_more_is_gone(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch, beats: float
) -> None:
    """Its kernel stands still, for example; its system would answer."""
    monkeypatch.setattr(link, "_SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(link, "_BEAT_SECONDS", beats)
    meeting.come(0).hear("present")
    time.sleep(2.0)
    wait_until(lambda: len(meeting.coordinator._peers) == (1 if beats < 1 else 0))


def test_nodes_that_come_while_a_coordinator_closes_are_let_go() -> None:
    """They are those of the next run at the same place, and would wait for an answer."""
    gc.disable()  # it closes forgotten connections, at some time
    told = 0
    try:
        for _ in range(40):
            listening = socket.create_server(("127.0.0.1", 0))
            coordinator = Coordinator(listening, Rendezvous(num_nodes=2), CLAIM)
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
    host.hear("present")
    (end,) = meeting.coordinator._peers
    assert {meeting.coordinator, end, host.link} <= set(runtime.owners())
    assert meeting.coordinator.filenos() == [meeting.listening.fileno()]
    with (
        socket.socket(fileno=os.dup(*end.filenos())) as ours,
        socket.socket(fileno=os.dup(*host.link.filenos())) as its,
    ):
        assert ours.getpeername() == its.getsockname()
    meeting.close()
    assert not {meeting.coordinator, end, host.link} & set(runtime.owners())
    assert meeting.coordinator.filenos() == end.filenos() == host.link.filenos() == []


def test_nodes_of_one_name_may_disagree() -> None:
    """Machines of a cloud are often called alike, and nobody has a rank before all are there."""
    (line,) = find_disagreements([node(0, torch="2.9"), node(0, torch="2.8")], complete=True)
    assert line == "torch: 2.9 on node 0 (one); 2.8 on node 0 (one)"


def end_well(each: Node, rank: int) -> None:
    each.say("outcome", NodeOutcome(node=node(rank), kind="done"))


def start_without(meeting: Meeting, count: int) -> list[Node]:
    """Return the nodes of a run of which node 1 has ended well and died."""
    nodes = [meeting.come(rank) for rank in range(count)]
    for each in nodes:
        each.hear("roster")
    end_well(nodes[1], 1)
    nodes[1].close()
    wait_until(lambda: len(meeting.coordinator._peers) == count - 1)
    return nodes


def test_a_node_that_had_ended_well_and_died_starts_no_run_again() -> None:
    """Its cell is run again while the others still work, which go on."""
    with contextlib.closing(Meeting(2, max_losses=3)) as meeting:
        nodes = start_without(meeting, 2)
        assert "has its 2 nodes already" in str(meeting.come(1).hear("refused"))
        end_well(nodes[0], 0)
        assert nodes[0].hear("verdict") is None


def test_a_node_that_had_ended_well_and_died_is_told_where_another_one_fails() -> None:
    with contextlib.closing(Meeting(3, max_losses=3)) as meeting:
        nodes = start_without(meeting, 3)
        nodes[0].say("node", (node(0), 1))
        assert nodes[2].hear("again")[1].startswith("node 1 (one) is gone without a word")


def test_the_next_launch_of_a_node_that_was_stopped_waits_for_the_end_of_this_one(meeting: Meeting) -> None:
    nodes = [meeting.come(rank) for rank in range(3)]
    for each in nodes:
        each.hear("roster")
    nodes[1].say("outcome", NodeOutcome(node=node(1), kind="stopped", text="node 1 (one) was stopped"))
    nodes[1].close()
    nodes[0].hear("trouble")
    meeting.come(1).hear("over")


def test_a_spare_node_takes_part_after_any_restart() -> None:
    with contextlib.closing(Meeting(2, least=1, last_call=PATIENCE_S)) as meeting:
        nodes = [meeting.come(rank) for rank in range(2)]
        for each in nodes:
            each.hear("roster")
        spare = meeting.come(2)
        for each in nodes:
            each.say("node", (node(nodes.index(each)), 1))
        for each in nodes:
            assert each.hear("roster").attempt == 1
        nodes[1].close()
        nodes[0].hear("again")
        nodes[0].say("node", (node(0), 2))
        assert [len(each.hear("roster").nodes) for each in (nodes[0], spare)] == [2, 2]


def test_more_nodes_than_a_run_has_are_refused() -> None:
    """They were there before the one with the coordinator."""
    with contextlib.closing(Meeting(2, backend="c10d")) as meeting:
        early = [meeting.come(1) for _ in range(2)]
        for each in early:
            each.hear("present")
        host = meeting.come(0)
        assert len(host.hear("roster").nodes) == 2
        heard = [each.inbox.get(timeout=PATIENCE_S)[1] for each in early]
        assert sorted(message.kind for message in heard if message is not None) == ["refused", "roster"]


def test_a_reader_without_memory_is_the_end_of_its_connection(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: NodeLink, size: int) -> bytearray:
        raise MemoryError

    host = meeting.come(0)
    host.hear("present")
    monkeypatch.setattr(NodeLink, "_read", fail)
    wait_until(lambda: not meeting.coordinator._peers)


def test_what_was_said_last_arrives_over_a_slow_network(meeting: Meeting) -> None:
    """The kernel has taken all of it long before the other end has."""
    host, listening = meeting.come(0), socket.create_server(("127.0.0.1", 0))
    host.hear("present")
    with listening, socket.create_connection(listening.getsockname()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        end = NodeLink(listening.accept()[0], None, queue.SimpleQueue(), messages.NO_LIMIT)
        end.start()
        end.say(Message("refused", "x" * 100_000))
        closing = threading.Thread(target=end.close, args=(PATIENCE_S,))
        closing.start()
        size = 0
        while data := slow.recv(1 << 13):
            size += len(data)
            time.sleep(0.01)
        slow.close()
        closing.join()
    assert size > 100_000
