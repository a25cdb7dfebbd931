"""Strangers who know the protocol and read the store: nothing of theirs runs, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from notebook_accel.events import Failure, Pickle, RaisedError
from notebook_accel.launch.checks import addresses
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.nodes import coordinator as coordinator_module
from notebook_accel.launch.engines.nodes import messages, outcomes
from notebook_accel.launch.engines.nodes.coordinator import Coordinator
from notebook_accel.launch.engines.nodes.meeting import NodeRendezvous
from notebook_accel.launch.engines.nodes.messages import CoordinatorConnection, Message, MessageKind
from notebook_accel.launch.engines.nodes.node_info import NodeInfo
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.launch.job import Job, Rendezvous
from notebook_accel.trust import plain, proof
from notebook_accel.trust.proof import Answer, Challenge, ProofError
from notebook_accel.trust.secret import Trust
from tests.ports import free_port
from tests.unit.clock import PATIENCE_S, wait_until
from tests.unit.jobs import make_job

TOKEN = bytes(range(32))
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


def node(rank: int) -> NodeInfo:
    return NodeInfo(node_rank=rank, host="one", processes=1)


def make_failure(pickled: bytes, name: str = "MyError", **more: Any) -> NodeOutcome:
    error = RaisedError(type_name=name, message="the text", pickled=Pickle(pickled), frames=[], **more)
    return NodeOutcome(node=node(1), kind="failed", failure=Failure(rank=1, time=1.0, pid=7, error=error))


class Meeting:
    """A coordinator for two nodes; only with a secret it keeps strangers out."""

    def __init__(self, secret: str | None) -> None:
        self.trust = Trust(secret)
        listening = addresses.listen_for_nodes("127.0.0.1")
        self.where = listening.getsockname()
        self.coordinator = Coordinator(
            listening,
            self.trust.derive_key(TOKEN),
            2,
            elects=False,
            before_restart=lambda: None,
            proven=self.trust.is_proven,
        )
        self.stack = contextlib.ExitStack()
        self.stack.callback(self.coordinator.close)

    def come(self, rank: int) -> CoordinatorConnection:
        key, proven = self.trust.derive_key(TOKEN), self.trust.is_proven
        connection = CoordinatorConnection(*self.where, key, PATIENCE_S, proven=proven)
        self.stack.callback(connection.close)
        connection.start_pulse(*self.where, key, PATIENCE_S)
        connection.say(Message("node", (node(rank), 0, rank == 0)))
        return connection

    def intrude(self, content: bytes, key: bytes = TOKEN) -> None:
        """Send bytes as one who knows what the store says; return once the coordinator has ended the connection."""
        with socket.create_connection(self.where) as stranger:
            stranger.settimeout(PATIENCE_S)
            stranger.sendall(
                Answer(key, messages.PURPOSE, stranger.recv(proof.GREETING_BYTES)).content + content
            )
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(1 << 16):
                    pass

    def run_to_its_end(self, second: NodeOutcome | None = None) -> list[Any]:
        """Let both nodes meet and end; return what each hears of the other's end."""
        nodes = [self.come(rank) for rank in range(2)]
        for each in nodes:
            hear(each, "roster")
        for rank, each in enumerate(nodes):
            own = NodeOutcome(node=node(rank), kind="done")
            each.say(Message("outcome", second if rank and second else own))
        return [hear(each, "verdict") for each in nodes]


def hear(connection: CoordinatorConnection, kind: MessageKind) -> Any:
    while (message := connection.hear(PATIENCE_S)) is not None:
        if message.kind == kind:
            return message.value
    raise AssertionError(f"no {kind} was heard")


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def meeting(request: pytest.FixtureRequest) -> Iterator[Meeting]:
    made = Meeting(request.param)
    with made.stack:
        yield made


def frame(*parts: bytes) -> bytes:
    sizes = b"".join(struct.pack("<Q", len(part)) for part in parts)
    return struct.pack("<I", len(parts)) + sizes + b"".join(parts)


def test_a_coordinator_loads_no_pickle(meeting: Meeting, hostile: bytes) -> None:
    said = b"".join(messages.encode(Message("outcome", make_failure(hostile)), None))
    for content in (frame(hostile), frame(pickle.dumps(("outcome", 1))), frame(b"[]"), b"\xff" * 100):
        meeting.intrude(content)
    if meeting.trust.is_proven:
        meeting.intrude(said)
    assert meeting.run_to_its_end() == [None, None]


def test_an_error_comes_with_its_pickle_from_proven_nodes_only(meeting: Meeting) -> None:
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
            with connection:
                challenge = Challenge(TOKEN, messages.PURPOSE)
                connection.sendall(challenge.greeting)
                acceptance = challenge.accept(connection.recv(proof.ANSWER_BYTES))
                connection.sendall(acceptance.reply + frame(hostile))
                connection.recv(1)

        serving = threading.Thread(target=serve)
        serving.start()
        connection = CoordinatorConnection(*impostor.getsockname(), TOKEN, PATIENCE_S)
        while not connection.is_lost:
            assert connection.hear(0.01) is None
        connection.close()
        serving.join()


def test_another_secret_and_a_recorded_proof_are_refused() -> None:
    meeting = Meeting(SECRET)
    key = meeting.trust.derive_key(TOKEN)
    with meeting.stack:
        for wrong in (TOKEN, Trust("another secret, as long").derive_key(TOKEN)):
            with pytest.raises(ProofError):
                proof.connect(meeting.where, wrong, messages.PURPOSE, timeout=PATIENCE_S)
        with socket.create_connection(meeting.where) as first:
            answer = Answer(key, messages.PURPOSE, first.recv(proof.GREETING_BYTES))
            first.sendall(answer.content)
            answer.check(first.recv(proof.REPLY_BYTES))
        with socket.create_connection(meeting.where) as second:
            second.recv(proof.GREETING_BYTES)
            second.sendall(answer.content)
            assert second.recv(1) == b""
        assert meeting.run_to_its_end() == [None, None]


def test_silent_connections_keep_no_node_out(meeting: Meeting) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(meeting.where))
        host = meeting.come(0)
        for _ in range(50):
            stack.enter_context(socket.create_connection(meeting.where))
        hear(host, "present")
        assert len(meeting.coordinator._guests) <= coordinator_module._MAX_GUESTS + 2 * 2
        meeting.come(1)
        hear(host, "roster")


def test_nodes_of_a_run_are_no_guests(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay, however many others come."""
    monkeypatch.setattr(coordinator_module, "_MAX_GUESTS", 0)
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        hear(each, "roster")
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(meeting.where))
        for each in nodes:
            each.say(Message("outcome", NodeOutcome(node=node(nodes.index(each)), kind="done")))
        assert [hear(each, "verdict") for each in nodes] == [None, None]
        for each in nodes:
            assert each._pulse is not None and each._pulse._waiting.is_alive(), "it stays, too"


def let_time_pass(coordinator: Coordinator, seconds: float) -> None:
    """Let the clock of a coordinator go on."""
    loop: Any = coordinator._loop
    now = loop.time
    loop.call_soon_threadsafe(setattr, loop, "time", lambda: now() + seconds)


def test_a_silent_connection_is_dropped_after_a_while() -> None:
    meeting = Meeting(None)
    with (
        meeting.stack,
        socket.create_connection(meeting.where) as silent,
        socket.create_connection(meeting.where) as half,
    ):
        half.sendall(Answer(TOKEN, messages.PURPOSE, half.recv(proof.GREETING_BYTES)).content)
        assert len(half.recv(1 << 10)) == proof.REPLY_BYTES, "it proved the token"
        silent.recv(proof.GREETING_BYTES)
        let_time_pass(meeting.coordinator, 3600.0)
        for each in (silent, half):
            each.settimeout(PATIENCE_S)
            assert each.recv(1) == b"", "it says nothing"


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
    job: Job = make_job(len, distributed=True, rendezvous=rendezvous)
    return NodeRendezvous(job)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_nodes_that_come_and_go_meet(secret: str | None, port: int) -> None:
    nodes = [make_elastic(port, secret, node_rank=rank, min_nodes=2) for rank in range(2)]
    with ThreadPoolExecutor() as pool:
        meeting = [pool.submit(each.meet) for each in nodes]
        try:
            found = [each.result(2 * PATIENCE_S) for each in meeting]
            assert [(each.node_rank, each.num_nodes) for each in found] == [(0, 2), (1, 2)]
            assert not nodes[0].finish_attempt()
            end = time.monotonic() + PATIENCE_S
            nodes[1].finish_attempt()
            while not all(each.finish_attempt() for each in nodes):
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            for each in reversed(nodes):
                each.leave()


def test_a_stranger_that_stays_keeps_no_host(meeting: Meeting) -> None:
    """Only nodes of the run are waited for."""
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        hear(each, "roster")
    hear(meeting.come(1), "refused")
    for each in nodes:
        assert not meeting.coordinator.is_empty
        each.say(Message("bye"))
        each.close()
    wait_until(lambda: meeting.coordinator.is_empty)


def test_a_refused_host_ends_no_run(meeting: Meeting) -> None:
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        hear(each, "roster")
    refused = meeting.come(0)
    hear(refused, "refused")
    refused.say(Message("outcome", NodeOutcome(node=node(0), kind="stopped")))
    refused.say(Message("node", (node(0), 0, True)))
    hear(refused, "refused")
    for rank, each in enumerate(nodes):
        each.say(Message("outcome", NodeOutcome(node=node(rank), kind="done")))
    assert [hear(each, "verdict") for each in nodes] == [None, None]


def test_a_refused_node_is_none_of_a_restart(meeting: Meeting) -> None:
    nodes = [meeting.come(rank) for rank in range(2)]
    for each in nodes:
        hear(each, "roster")
    refused = meeting.come(1)
    hear(refused, "refused")
    other = NodeInfo(node_rank=1, host="one", processes=1, same={"torch": "another"})
    refused.say(Message("node", (other, 5, False)))
    hear(refused, "refused")
    nodes[0].say(Message("node", (node(0), 1, True)))
    assert hear(nodes[1], "again") == (1, "")
    assert hear(nodes[0], "present") == [node(0)]
    nodes[1].say(Message("node", (node(1), 1, False)))
    for each in nodes:
        assert hear(each, "roster").nodes == [node(0), node(1)]


@pytest.mark.parametrize(("depth", "kind"), [(40, "failed"), (329, "lost")])
def test_causes_without_end_leave_no_node_waiting(depth: int, kind: str) -> None:
    meeting = Meeting(None)
    said = json.loads(plain.encode(NodeOutcome, make_failure(b""), proven=False))
    error = said["failure"]["error"]
    for _ in range(depth):
        error = {**error, "cause": error}
    said["failure"]["error"] = error
    with meeting.stack:
        nodes = [meeting.come(rank) for rank in range(2)]
        for each in nodes:
            hear(each, "roster")
        nodes[0].say(Message("outcome", NodeOutcome(node=node(0), kind="called off")))
        nodes[1]._connection.sendall(frame(json.dumps(["outcome", said]).encode()))
        assert hear(nodes[0], "verdict").kind == kind


def test_long_errors_arrive_as_errors(meeting: Meeting) -> None:
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


def make_fixed(**more: Any) -> NodeRendezvous:
    place: dict[str, Any] = {"address": "127.0.0.1", "port": free_port(), "num_nodes": 2, **more}
    return NodeRendezvous(make_job(len, distributed=True, rendezvous=Rendezvous(**place)))


def test_a_node_without_a_secret_shortens_its_outcome() -> None:
    nodes, said = make_fixed(), list[Message]()
    nodes._connection = cast(CoordinatorConnection, SimpleNamespace(say=said.append))
    parts = [RaisedError(type_name="A", message="a" * 250_000, pickled=None, frames=[])] * 80
    nodes._send_outcome(make_failure(b"", parts=parts))
    assert sum(len(piece) for piece in messages.encode(said[0], None)) < messages.MEMBER_LIMIT.value


def test_a_second_node_of_a_machine_connects_where_ports_may_be_shared(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    """On macOS a port may be taken at all addresses while it is in use at one of them."""
    nodes = make_fixed(backend="c10d", port=port)
    with socket.create_server(("127.0.0.1", nodes._port)):
        find = addresses.find_listen_problem
        monkeypatch.setattr(
            addresses, "find_listen_problem", lambda host, port: find(host, port) if host else ""
        )
        assert nodes._host_run() is None
