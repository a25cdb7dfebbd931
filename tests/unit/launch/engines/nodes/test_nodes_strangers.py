"""Strangers who know the protocol: nothing of theirs runs, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from notebook_accel.events import Failure, Pickle, RaisedError
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.nodes import coordinator as coordinator_module
from notebook_accel.launch.engines.nodes import link, messages, outcomes
from notebook_accel.launch.engines.nodes.meeting import NodeRendezvous
from notebook_accel.launch.engines.nodes.messages import Message
from notebook_accel.launch.engines.nodes.node_info import NodeInfo
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.launch.job import Job, Rendezvous
from notebook_accel.launch.supervise.control import Control
from notebook_accel.trust import plain, proof
from notebook_accel.trust.proof import Answer, ProofError
from notebook_accel.trust.secret import OPEN, Trust
from tests.ports import free_port
from tests.unit.clock import PATIENCE_S, wait_until
from tests.unit.jobs import make_job
from tests.unit.launch.engines.nodes.test_coordinator import CLAIM, Meeting, Node, node

SECRET = "correct horse battery staple"


class Touch:
    """Makes a file when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[bytes]:
    """A pickle; the test fails where anything has loaded it."""
    path = tmp_path / "made by a stranger"
    yield pickle.dumps(Touch(path))
    assert not path.exists()


def make_failure(pickled: bytes, name: str = "MyError", **more: Any) -> NodeOutcome:
    error = RaisedError(type_name=name, message="the text", pickled=Pickle(pickled), frames=[], **more)
    return NodeOutcome(node=node(1), kind="failed", failure=Failure(rank=1, time=1.0, pid=7, error=error))


class Crowd(Meeting):
    """A coordinator for two nodes; only with a secret it keeps strangers out."""

    def __init__(self, secret: str | None) -> None:
        super().__init__(2, Trust(secret))
        self.where = ("127.0.0.1", self.port)
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.close)

    def reach(self) -> socket.socket:
        """Return the connection of a stranger who has been greeted."""
        stranger = socket.create_connection(self.where)
        stranger.settimeout(PATIENCE_S)
        assert len(stranger.recv(1)) == 1
        return stranger

    def intrude(self, content: bytes, key: bytes = OPEN.key) -> None:
        """Send bytes as one who knows the protocol; return once the coordinator has ended the connection."""
        with self.reach() as stranger, contextlib.suppress(OSError):
            with contextlib.suppress(ProofError):
                proof.answer(stranger, key, link.PURPOSE)
            stranger.sendall(content)
            while stranger.recv(1 << 16):
                pass

    def run_to_its_end(self, second: NodeOutcome | None = None) -> list[Any]:
        """Let both nodes meet and end; return what each hears of the other's end."""
        nodes = [self.come(rank) for rank in range(2)]
        for each in nodes:
            each.hear("roster")
        for rank, each in enumerate(nodes):
            own = NodeOutcome(node=node(rank), kind="done")
            each.say("outcome", second if rank and second else own)
        return [each.hear("verdict") for each in nodes]


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def meeting(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    made = Crowd(request.param)
    with made.stack:
        yield made


def frame(*parts: bytes) -> bytes:
    sizes = b"".join(struct.pack("<Q", len(part)) for part in parts)
    return struct.pack("<I", len(parts)) + sizes + b"".join(parts)


def test_a_coordinator_loads_no_pickle(meeting: Crowd, hostile: bytes) -> None:
    said = b"".join(messages.encode(Message("outcome", make_failure(hostile)), None))
    for content in (frame(hostile), frame(pickle.dumps(("outcome", 1))), frame(b"[]"), b"\xff" * 100):
        meeting.intrude(content)
    if meeting.trust.is_proven:
        meeting.intrude(said)
    assert meeting.run_to_its_end() == [None, None]


def test_an_error_comes_with_its_pickle_from_proven_nodes_only(meeting: Crowd) -> None:
    harmless = pickle.dumps(ValueError("the text"))
    verdicts = meeting.run_to_its_end(make_failure(harmless))
    expected = harmless if meeting.trust.is_proven else None
    assert [verdict.failure.error.pickled for verdict in verdicts] == [expected] * 2
    (outcome,) = {type(outcomes.blame(verdict, Outcome()).cause) for verdict in verdicts}
    assert outcome is Failure


def test_a_node_loads_no_pickle_of_a_false_coordinator(hostile: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def serve() -> None:
            connection, _ = impostor.accept()
            with connection, contextlib.suppress(OSError):
                link.welcome(connection, OPEN, PATIENCE_S)
                connection.sendall(frame(hostile))
                while connection.recv(1 << 10):
                    pass

        serving = threading.Thread(target=serve)
        serving.start()
        connected = Node(impostor.getsockname()[1], OPEN)
        assert connected.inbox.get(timeout=PATIENCE_S) == (connected.link, None)
        connected.close()
        serving.join()


def test_another_secret_and_a_recorded_proof_are_refused() -> None:
    meeting = Crowd(SECRET)
    with meeting.stack:
        for trust, said in [
            (OPEN, "the run there has a secret, and this node has none: give all nodes the same secret"),
            (Trust("another secret, as long"), "the run there has another secret than this node"),
        ]:
            with pytest.raises(ProofError, match=said):
                link.connect(*meeting.where, trust, PATIENCE_S)
        with meeting.reach() as first:
            answer = Answer(meeting.trust.key, link.PURPOSE, first.recv(proof.GREETING_BYTES))
            first.sendall(answer.content)
            answer.check(first.recv(proof.REPLY_BYTES))
        with meeting.reach() as second:
            second.recv(proof.GREETING_BYTES)
            second.sendall(answer.content)
            assert second.recv(1) == b""
        assert meeting.run_to_its_end() == [None, None]
    meeting = Crowd(None)
    with meeting.stack, pytest.raises(ProofError, match="has a secret, and the run there has none"):
        link.connect(*meeting.where, Trust(SECRET), PATIENCE_S)


def test_silent_connections_keep_no_node_out(meeting: Crowd) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(meeting.where))
        host = meeting.come(0)
        for _ in range(50):
            stack.enter_context(socket.create_connection(meeting.where))
        host.hear("present")
        there = [*meeting.coordinator._peers, *meeting.coordinator._strangers]
        assert len(there) <= coordinator_module._MAX_GUESTS + 2 * 2 + 1
        meeting.come(1)
        host.hear("roster")


def test_nodes_of_a_run_are_no_guests(meeting: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay, however many others come."""
    monkeypatch.setattr(coordinator_module, "_MAX_GUESTS", 0)
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        each.hear("roster")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(meeting.where))
        for each in nodes:
            each.say("outcome", NodeOutcome(node=node(nodes.index(each)), kind="done"))
        assert [each.hear("verdict") for each in nodes] == [None, None]


def test_a_connection_without_a_proof_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "_PROOF_SECONDS", 0.3)
    meeting = Crowd(None)
    with meeting.stack, meeting.reach() as silent:
        silent.recv(proof.GREETING_BYTES)
        assert silent.recv(1) == b"", "it says nothing"


# -- nodes that come and go


def make_elastic(port: int, secret: str | None, **more: Any) -> NodeRendezvous:
    settings = {"join_timeout": PATIENCE_S, "last_call_timeout": 0.2, "keep_alive_max_attempt": 100}
    place: dict[str, Any] = {
        "address": "127.0.0.1",
        "port": port,
        "num_nodes": 2,
        "min_nodes": 1,
        "backend": "c10d",
    }
    rendezvous = Rendezvous(**{**place, "settings": settings, "trust": Trust(secret), **more})
    job: Job = make_job(len, distributed=True, rendezvous=rendezvous, returns="all")
    return NodeRendezvous(job, Control(), lambda text: None)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_nodes_that_come_and_go_meet(secret: str | None, port: int) -> None:
    nodes = [make_elastic(port, secret, node_rank=rank, min_nodes=2) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        meeting = [pool.submit(each.meet) for each in nodes]
        try:
            found = [each.result(2 * PATIENCE_S) for each in meeting]
            assert [(each.node_rank, each.num_nodes) for each in found] == [(0, 2), (1, 2)]
            well = Outcome()
            ends = [pool.submit(each.finish, well, None, is_complete=True) for each in nodes]
            assert [each.result(PATIENCE_S) for each in ends] == [well, well]
        finally:
            for each in reversed(nodes):
                each.leave()


def test_a_stranger_that_stays_keeps_no_host(meeting: Crowd) -> None:
    """Only nodes of the run are waited for."""
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        each.hear("roster")
    meeting.come(1).hear("refused")
    for each in nodes:
        assert not meeting.coordinator.is_empty
        each.close()
    wait_until(lambda: meeting.coordinator.is_empty)


def test_a_refused_host_ends_no_run(meeting: Crowd) -> None:
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        each.hear("roster")
    refused = meeting.come(0)
    refused.hear("refused")
    refused.say("outcome", NodeOutcome(node=node(0), kind="stopped"))
    refused.say("node", (node(0), 0))
    refused.hear("refused")
    for rank, each in enumerate(nodes):
        each.say("outcome", NodeOutcome(node=node(rank), kind="done"))
    assert [each.hear("verdict") for each in nodes] == [None, None]


def test_a_refused_node_is_none_of_a_restart(meeting: Crowd) -> None:
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        each.hear("roster")
    refused = meeting.come(1)
    refused.hear("refused")
    other = NodeInfo(node_rank=1, host="one", processes=1, same={"torch": "another"})
    refused.say("node", (other, 0))
    refused.hear("refused")
    nodes[0].say("node", (node(0), 1))
    assert nodes[1].hear("again") == (1, "")
    assert nodes[0].hear("present") == [node(0)]
    nodes[1].say("node", (node(1), 1))
    for each in nodes:
        assert each.hear("roster").nodes == [node(0), node(1)]


@pytest.mark.parametrize(("depth", "kind"), [(40, "failed"), (329, "lost")])
def test_causes_without_end_leave_no_node_waiting(depth: int, kind: str) -> None:
    meeting = Crowd(None)
    said = json.loads(plain.encode(NodeOutcome, make_failure(b""), proven=False))
    error = said["failure"]["error"]
    for _ in range(depth):
        error = {**error, "cause": error}
    said["failure"]["error"] = error
    with meeting.stack:
        nodes = [meeting.come(rank) for rank in range(2)]
        for each in nodes:
            each.hear("roster")
        nodes[0].say("outcome", NodeOutcome(node=node(0), kind="called off"))
        nodes[1].link._connection.sendall(frame(json.dumps(["outcome", said]).encode()))
        assert nodes[0].hear("verdict").kind == kind


def test_long_errors_arrive_as_errors(meeting: Crowd) -> None:
    """Each text is within its limit, and all of them together are not; a wide character takes six bytes."""
    text = "\u4e00" * 300_000
    parts = [RaisedError(type_name="A", message=text, pickled=None, frames=[]) for _ in range(12)]
    outcome = make_failure(b"", "ValueError", arguments=[text], parts=parts)
    if not meeting.trust.is_proven:
        outcome = outcomes.shorten(outcome, messages.MEMBER_LIMIT.value)
    for verdict in meeting.run_to_its_end(outcome):
        error = verdict.failure.error
        assert verdict.kind == "failed" and text.startswith(error.arguments[0])
        assert len(error.parts) == (12 if meeting.trust.is_proven else 0)
    short = make_failure(b"", "ValueError", arguments=["text"])
    assert outcomes.shorten(short, messages.MEMBER_LIMIT.value) is short


def test_a_node_without_a_secret_shortens_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Rendezvous(address="127.0.0.1", port=free_port(), num_nodes=2)
    nodes = NodeRendezvous(make_job(len, rendezvous=place), Control(), lambda text: None)
    said = list[Any]()
    monkeypatch.setattr(nodes, "_say", lambda kind, value: said.append(Message(kind, value)))
    parts = [RaisedError(type_name="A", message="a" * 250_000, pickled=None, frames=[])] * 80
    nodes._say_outcome(make_failure(b"", parts=parts))
    assert sum(len(piece) for piece in messages.encode(said[0], None)) < messages.MEMBER_LIMIT.value


def test_only_the_node_of_its_own_process_is_a_coordinators_host(meeting: Crowd) -> None:
    """Anybody may say that he is node 0."""
    impostor = meeting.connect(CLAIM + 1)
    impostor.say("node", (node(0), 0))
    impostor.hear("present")
    impostor.say("outcome", NodeOutcome(node=node(0), kind="stopped", text="by a stranger"))
    impostor.close()
    assert meeting.run_to_its_end() == [None, None]
