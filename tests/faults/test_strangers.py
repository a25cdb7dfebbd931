"""A stranger who knows the protocol: he is dropped, the run goes on, memory stays bounded, and nothing of his runs.

Where the package reads what another process or person wrote, and where strangers are tried there:

| reader | who can write there | tried in |
|---|---|---|
| `Listener` of a run on Ray | who reaches its port | here, tests/unit/stream/test_listener.py |
| `Coordinator` of nodes | who reaches its port | here, tests/unit/launch/engines/nodes/test_nodes_strangers.py |
| `NodeLink` of a node | who listens where it connects to, where there is no secret | here |
| values and errors of other nodes | a node that proves no secret | fuzzed_messages |
| event sockets of workers, also of sessions and Ray's processes (`FrameReader`) | the worker's own code | here |
| orders in workers, sessions and Ray's actors (`FrameReader`) | the notebook | tests/unit/launch/worker |
| events from hosts, and orders there (`FrameReader`) | the other end, by ssh | tests/unit/launch/engines/remote |
| output of ranks (`LineReader`), bars, metrics, displays | the worker's own code | here, fuzzed_output |
| orders to agents, shared memory, lifelines | this user: descriptors without a name | |
| manifests, indices, weights, files of torch.save | who made the checkpoint | fuzzed_files |
| configs, DeepSpeed's JSON, notebooks, parameters | who wrote the file | fuzzed_files |
| variables of the environment, arguments, magics | the user | fuzzed_words |
| fields and buttons of the form, the view's buttons | any script of the page | fuzzed_words |
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accel.events import Failure, Frame, RaisedError
from notebook_accel.launch.checks import addresses
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.nodes import link, outcomes
from notebook_accel.launch.engines.nodes.node_info import NodeInfo
from notebook_accel.launch.engines.nodes.outcomes import NodeOutcome
from notebook_accel.launch.transfer import failures
from notebook_accel.stream.listener import Listener
from notebook_accel.trust import plain, proof
from notebook_accel.trust.proof import Answer
from notebook_accel.trust.secret import OPEN
from tests.faults.scripts import run
from tests.unit.launch.engines.nodes.test_coordinator import Node, node
from tests.unit.launch.engines.nodes.test_nodes_strangers import SECRET, Crowd, frame

SECONDS = 60.0


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def meeting(request: pytest.FixtureRequest) -> Iterator[Crowd]:
    made = Crowd(request.param)
    with made.stack:
        yield made


def come(meeting: Crowd, content: bytes = b"") -> socket.socket:
    """Return the connection of a stranger who knows the protocol and says something."""
    stranger = meeting.reach()
    stranger.settimeout(SECONDS)
    with contextlib.suppress(proof.ProofError):
        proof.answer(stranger, OPEN.key, link.PURPOSE)
    with contextlib.suppress(OSError):  # he was dropped
        stranger.sendall(content)
    return stranger


def say(kind: str, value: Any, *parts: bytes) -> bytes:
    return frame(json.dumps([kind, value]).encode(), *parts)


NODE = {"node_rank": 1, "host": "one", "processes": 1, "same": {}}
DEEP = b"[" * 100_000
HOSTILE = {
    "nothing": frame(b""),
    "many beats": struct.pack("<I", 0) * 100_000,
    "2**32-1 parts": struct.pack("<I", 2**32 - 1),
    "a length of 2**63": struct.pack("<IQ", 1, 2**63),
    "half a frame": struct.pack("<IQ", 1, 100) + b"[",
    "parts of a guest": say("news", None, b"x"),
    "nested too deeply": frame(b'["node", ' + DEEP),
    "an integer of 10,000 digits": frame(b'["node", ' + b"9" * 10_000 + b"]"),
    "a rank of 2**63": say("node", [{**NODE, "node_rank": 2**63}, 0]),
    "a rank that is no number": say("node", [{**NODE, "node_rank": float("nan")}, 0]),
    "an attempt of 2**62": say("node", [NODE, 2**62]),
    "no attempt": say("node", [NODE, -5]),
    "minus one process": say("node", [{**NODE, "processes": -1}, 0]),
    "a host of 100,000 letters": say("node", [{**NODE, "host": "x" * 100_000}, 0]),
    "keys twice": frame(b'["node", [{"node_rank": 1, "node_rank": 0, "host": "a"}, 0]]'),
    "orders of the coordinator": b"".join(
        say(kind, value) for kind, value in (("over", None), ("again", 7), ("verdict", None), ("roster", {}))
    ),
    "an end before a beginning": say("stop", None) + say("value", [1.0, ""]) + say("held", None),
    "many small messages": say("news", None) * 20_000 + frame(b""),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=list(HOSTILE))
def test_a_run_goes_on_whatever_a_stranger_says(content: bytes) -> None:
    for secret in (None, SECRET):
        meeting = Crowd(secret)
        with meeting.stack, come(meeting, content) as stranger:
            assert meeting.run_to_its_end() == [None, None]
            with contextlib.suppress(OSError):  # he was dropped
                stranger.shutdown(socket.SHUT_WR)


def test_a_stranger_who_never_reads_takes_no_memory() -> None:
    meeting = Crowd(None)
    own = psutil.Process()
    with meeting.stack:
        meeting.come(0)
        big = {**NODE, "node_rank": 3, "same": {"a": "x" * 200_000}}
        with come(meeting, say("node", [{**NODE, "node_rank": 3}, 0])) as stranger:
            before = own.memory_info().rss
            with contextlib.suppress(OSError):
                for _ in range(200):
                    stranger.sendall(say("node", [big, 0]))
                for _ in range(20_000):
                    stranger.sendall(say("node", [{**NODE, "node_rank": 3}, 0]))
            assert own.memory_info().rss - before < 200_000_000


def test_a_challenge_that_is_sent_back_is_no_answer(meeting: Crowd) -> None:
    with meeting.reach() as stranger:
        greeting = stranger.recv(proof.GREETING_BYTES)
        stranger.sendall(greeting + bytes(proof.ANSWER_BYTES - len(greeting)))
        assert not _read_all(stranger)
    assert meeting.run_to_its_end() == [None, None]


def test_who_passes_a_challenge_on_to_a_node_can_say_nothing_of_his_own() -> None:
    """He sits between a node and the coordinator: both prove themselves, and he knows no tag of what follows."""
    meeting = Crowd(SECRET)
    listening = socket.create_server(("127.0.0.1", 0))

    def pass_on() -> None:
        with listening.accept()[0] as victim, socket.create_connection(meeting.where) as stranger:
            stranger.settimeout(SECONDS)
            victim.settimeout(SECONDS)
            victim.sendall(_read(stranger, 1 + proof.GREETING_BYTES))
            stranger.sendall(_read(victim, proof.ANSWER_BYTES))
            victim.sendall(_read(stranger, proof.REPLY_BYTES))
            stranger.sendall(say("node", [NODE, 0]) + bytes(32))
            victim.sendall(say("refused", "by a stranger") + bytes(32))
            ends.append(_read_all(stranger))

    ends: list[bytes] = []
    with meeting.stack, listening:
        thread = threading.Thread(target=pass_on)
        thread.start()
        connection = Node(listening.getsockname()[1], meeting.trust)
        assert connection.inbox.get(timeout=SECONDS) == (connection.link, None)
        thread.join(SECONDS)
        assert ends == [b""]
        connection.close()
        assert meeting.run_to_its_end() == [None, None]


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += connection.recv(size - len(data))
    return data


def _read_all(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while more := connection.recv(1 << 16):
            data += more
    return data


def test_a_flood_of_a_false_coordinator_takes_no_memory() -> None:
    """Nothing is asked for while a node does other things: what is not heard yet is bounded, and it can leave."""
    listening = socket.create_server(("127.0.0.1", 0))
    own, sent = psutil.Process(), [0]

    def flood() -> None:
        with listening.accept()[0] as victim, contextlib.suppress(OSError):
            link.welcome(victim, OPEN, 1.0)
            big = say("refused", "x" * 200_000)
            while sent[0] < 3_000:
                victim.sendall(big)
                sent[0] += 1

    with listening:
        thread = threading.Thread(target=flood)
        thread.start()
        connection = Node(listening.getsockname()[1], OPEN)
        before = own.memory_info().rss
        thread.join(SECONDS)
        assert own.memory_info().rss - before < 300_000_000
        assert connection.inbox.get(timeout=SECONDS)[1] is not None
        connection.close()
    assert sent[0] < 3_000


def test_parts_belong_to_values_alone() -> None:
    meeting = Crowd(None)
    with meeting.stack:
        nodes = [meeting.come(rank) for rank in range(2)]
        for each in nodes:
            each.hear("roster")
        nodes[1].say("news", None, bytes(10))
        assert "gone without a word" in nodes[0].hear("verdict").text


# -- what strangers write is shown as text


ESCAPES = "one\x1b]0;title\x07\x1b[2J\r\x9b1m\ud800\0"


def test_words_of_strangers_move_no_cursor() -> None:
    found = plain.load(NodeInfo, {**NODE, "host": ESCAPES, "same": {"a": ESCAPES}}, proven=False)
    for text in (found.host, found.same["a"]):
        assert text.isprintable() and text.encode() and text.startswith("one\\x1b]0;title\\x07")
    assert plain.load(str, "two\nlines\t", proven=False) == "two\nlines\t"


# -- errors and values of nodes


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/stdin", "/proc/kmsg", "/dev/random"])
def test_no_device_is_read_to_show_a_line_of_another_node(name: str) -> None:
    frames = [Frame(filename=name, lineno=3, first_lineno=1, name="f", qualname="f")]
    inner = RaisedError(type_name="KeyError", message="a", pickled=None, frames=frames)
    error = RaisedError(
        type_name="ExceptionGroup",
        message="a",
        pickled=None,
        frames=frames,
        parts=[inner],
        cause=inner,
        context=inner,
    )
    failure = failures.rename_files(Failure(rank=1, time=1.0, pid=7, error=error))
    assert failure.error is not None and failure.error.cause is not None and failure.error.context is not None
    for each in (failure.error, failure.error.cause, failure.error.context, *failure.error.parts):
        assert each.frames[0].filename == f"<{name}>"


@pytest.mark.parametrize("name", [__file__, "<string>", "<frozen runpy>"])
def test_names_that_can_be_read_or_that_no_file_has_are_kept(name: str) -> None:
    frames = [Frame(filename=name, lineno=3, first_lineno=1, name="f", qualname="f")]
    error = RaisedError(type_name="KeyError", message="a", pickled=None, frames=frames)
    cause = NodeOutcome(node=node(1), kind="failed", failure=Failure(rank=1, time=1.0, pid=7, error=error))
    found = outcomes.blame(cause, Outcome()).cause
    assert found is not None and found.error is not None and found.error.frames[0].filename == name


def test_made_up_frames_take_no_time() -> None:
    frames = [
        Frame(filename="a.py", lineno=2**40, first_lineno=1, name="f", qualname="f", columns=(-1, 2, 3))
        for _ in range(30_000)
    ]
    error = RaisedError(type_name="KeyError", message="a", pickled=None, frames=frames)
    failure = failures.rename_files(Failure(rank=1, time=1.0, pid=7, error=error))
    assert failure.error is not None and len(failure.error.frames) < 10_000
    assert isinstance(failures.revive(failure.error, 1, 7), BaseException)


# -- Ray's ranks


def test_a_rank_that_claims_anothers_place_gets_it_once() -> None:
    listener = Listener(addresses.listen("127.0.0.1", 0), 2)
    admitted = []
    with contextlib.ExitStack() as stack:
        for claim in (1, 1, 2, 2**32 - 1, 0):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            peer.settimeout(SECONDS)
            while not listener._pending:
                admitted += listener.admit()
            answer = Answer(listener.token, "ranks", peer.recv(proof.GREETING_BYTES), claim)
            peer.sendall(answer.content)
            deadline = time.monotonic() + SECONDS
            while listener._pending and time.monotonic() < deadline:
                admitted += listener.admit()
        assert [rank for rank, _ in admitted] == [1, 0] and not listener.missing
        for _, connection in admitted:
            connection.close()
    listener.close()


# -- workers of this machine


def test_a_rank_whose_connection_holds_other_bytes_is_lost(tmp_path: Path) -> None:
    out = run(
        """
        def train():
            from notebook_accel import runtime
            if os.environ["RANK"] == "1":
                runtime.reporter()._emitter._socket.sendall(bytes(8))
            time.sleep(60)

        for method in ("fork", "fresh"):
            began = time.monotonic()
            try:
                notebook_launcher(train, num_processes=2, start_method=method, view="none")
            except na.WorkerError as error:
                print(method, error, time.monotonic() - began < 50)
        with Session(2) as session:
            try:
                session.run(train)
            except na.WorkerError as error:
                print("session", error)
            print(session)
            session.restart()
            print("restarted", session.run(lambda: int(os.environ["RANK"]), returns="all"))
        """,
        tmp_path,
    )
    why = "rank 1 is lost: what it sends cannot be read (a frame has 0 parts)"
    assert f"fork {why}" in out and f"fresh {why}" in out and f"session {why}" in out, out
    assert "2 processes: dead" in out and "restarted [0, 1]" in out, out


def test_a_rank_may_print_anything(tmp_path: Path) -> None:
    out = run(
        """
        def train():
            long = "\\x1b[" + "9" * 6_000
            for piece in (long + "A", long + "m", "\\0\\x1b]0;t\\x07", "\\r" * 9_000):
                print(piece)
                print(piece, file=sys.stderr, end="")
            os.write(1, bytes(range(256)) * 4_000)
            return int(os.environ["RANK"])

        print("returned", notebook_launcher(train, num_processes=2, returns="all", view="none"))
        """,
        tmp_path,
    )
    assert "returned [0, 1]" in out
