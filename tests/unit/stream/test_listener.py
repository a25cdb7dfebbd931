"""Who may connect to the notebook."""

from __future__ import annotations

import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from notebook_accel.events import Lines
from notebook_accel.launch.checks import addresses
from notebook_accel.stream import listener as module
from notebook_accel.stream.inbox import Inbox
from notebook_accel.stream.listener import Listener, connect
from notebook_accel.stream.wire import frame
from notebook_accel.trust import proof
from notebook_accel.trust.proof import Answer, Challenge
from tests.unit.clock import PATIENCE_S, Clock, wait_until


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The listener's: nobody is late where a test does not say so."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@contextlib.contextmanager
def open_listener(ranks: int) -> Iterator[tuple[Listener, tuple[str, int]]]:
    listener = Listener(addresses.listen("127.0.0.1", 0), ranks)
    try:
        yield listener, ("127.0.0.1", listener.port)
    finally:
        listener.close()


def admit(listener: Listener, seconds: float = 0.3, until: int = 1000) -> list[tuple[int, socket.socket]]:
    found: list[tuple[int, socket.socket]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(found) < until:
        found += listener.admit()
        time.sleep(0.01)
    return found


def admit_nobody(listener: Listener, until: Callable[[], bool]) -> None:
    """Wait until something holds; meanwhile nobody comes in."""

    def holds() -> bool:
        assert listener.admit() == []
        return until()

    wait_until(holds)


def greet(listener: Listener, last: socket.socket) -> None:
    """Accept all that have connected, of which this one is the last."""

    def is_there() -> bool:
        return [one.connection.getpeername() for one in listener._pending[-1:]] == [last.getsockname()]

    admit_nobody(listener, is_there)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for the ranks, which wait for the listener."""
    with ThreadPoolExecutor() as made:
        yield made


@contextlib.contextmanager
def come(
    pool: ThreadPoolExecutor, listener: Listener, where: tuple[str, int], ranks: tuple[int, ...]
) -> Iterator[dict[int, tuple[socket.socket, socket.socket]]]:
    """Let ranks connect; yields both ends of each connection by rank."""
    coming = {rank: pool.submit(connect, where, listener.token, rank, PATIENCE_S) for rank in ranks}
    found = dict(admit(listener, PATIENCE_S, until=len(ranks)))
    with contextlib.ExitStack() as stack:
        ends = {rank: (stack.enter_context(found[rank]), coming[rank].result()) for rank in ranks}
        for _, end in ends.values():
            stack.enter_context(end)
        yield ends


def has_failed(
    pool: ThreadPoolExecutor, listener: Listener, where: tuple[str, int], token: bytes, rank: int
) -> bool:
    """Return whether a connection is refused."""
    coming: Future[socket.socket] = pool.submit(connect, where, token, rank, PATIENCE_S)
    while not coming.done():
        assert listener.admit() == []
        time.sleep(0.01)
    return isinstance(coming.exception(), proof.ProofError)


def is_dropped(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        while connection.recv(64):
            pass  # it was greeted
    except ConnectionResetError:
        pass
    return True


def test_each_rank_comes_in_once(pool: ThreadPoolExecutor) -> None:
    with open_listener(2) as (listener, where), come(pool, listener, where, (1, 0)):
        assert not listener.missing
        assert has_failed(pool, listener, where, listener.token, 1)


@pytest.mark.parametrize("rank", [0, 7])
def test_without_the_token_nobody_does(pool: ThreadPoolExecutor, rank: int) -> None:
    with open_listener(1) as (listener, where):
        token = (
            bytes(len(listener.token)) if rank == 0 else listener.token
        )  # of rank 7 the token does not help
        assert has_failed(pool, listener, where, token, rank)
        assert listener.missing == {0}


def test_what_does_not_know_the_token_is_no_notebook(pool: ThreadPoolExecutor) -> None:
    """Somebody took the port before the notebook: a rank takes no orders from it."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        coming = pool.submit(connect, impostor.getsockname(), bytes(32), 0, PATIENCE_S)
        connection, _ = impostor.accept()
        with connection:
            connection.sendall(bytes(proof.GREETING_BYTES))
            assert len(connection.recv(proof.ANSWER_BYTES)) == proof.ANSWER_BYTES
            connection.sendall(bytes(proof.REPLY_BYTES))
            assert isinstance(coming.exception(), proof.ProofError)


def test_a_recorded_proof_is_of_no_use() -> None:
    with open_listener(2) as (listener, where), socket.create_connection(where) as first:
        greet(listener, first)
        answer = Answer(listener.token, "ranks", first.recv(proof.GREETING_BYTES), 1)
        first.sendall(answer.content)
        ((rank, connection),) = admit(listener, PATIENCE_S, until=1)
        connection.close()
        assert rank == 1
        listener._missing.add(1)
        with socket.create_connection(where) as second:
            second.sendall(answer.content)
            assert admit(listener) == [] and is_dropped(second)


def test_a_proof_may_come_in_pieces() -> None:
    with open_listener(1) as (listener, where), socket.create_connection(where) as slow:
        greet(listener, slow)
        content = Answer(listener.token, "ranks", slow.recv(proof.GREETING_BYTES), 0).content
        slow.sendall(content[:20])
        admit_nobody(listener, lambda: len(listener._pending[0].received) == 20)
        slow.sendall(content[20:])
        ((rank, connection),) = admit(listener, PATIENCE_S, until=1)
        connection.close()
        assert rank == 0


def test_what_comes_after_the_proof_is_left_for_the_reader(pool: ThreadPoolExecutor) -> None:
    with open_listener(1) as (listener, where), come(pool, listener, where, (0,)) as ends:
        ours, theirs = ends[0]
        theirs.sendall(b"frames")
        ours.settimeout(PATIENCE_S)
        assert ours.recv(100) == b"frames"


def test_silent_connections_keep_nobody_out(pool: ThreadPoolExecutor) -> None:
    """There are more of them than may wait, before the ranks come and while they do."""
    with open_listener(2) as (listener, where), contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(where))
            listener.admit()
        with come(pool, listener, where, (0, 1)):
            assert len(listener._pending) <= listener._max_pending and not listener.missing


def test_there_is_room_for_all_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 0)
    with open_listener(3) as (listener, where), contextlib.ExitStack() as stack:
        for _ in range(3):
            last = stack.enter_context(socket.create_connection(where))
        greet(listener, last)
        assert len(listener._pending) == 3


def test_a_silent_connection_is_dropped_after_a_while(clock: Clock) -> None:
    with open_listener(1) as (listener, where), socket.create_connection(where) as silent:
        greet(listener, silent)
        clock.now += module._PROOF_SECONDS
        assert listener.admit() == [] and listener._pending
        clock.now += 1
        assert listener.admit() == [] and not listener._pending
        assert is_dropped(silent)


def test_a_closed_listener_drops_who_waits() -> None:
    with open_listener(1) as (listener, where), socket.create_connection(where) as silent:
        assert admit(listener, 0.1) == []
        listener.close()
        assert is_dropped(silent)
        with pytest.raises(OSError):
            socket.create_connection(where, timeout=5)


def test_a_stranger_whose_machine_is_down_stops_nobody(pool: ThreadPoolExecutor) -> None:
    """The system then says that the connection timed out, which takes minutes to bring about."""

    class Gone(socket.socket):
        def recv(self, *_: object) -> bytes:
            raise TimeoutError(110, "Connection timed out")

    with open_listener(1) as (listener, where):
        gone = Gone()
        listener._pending.append(module._Pending(gone, Challenge(listener.token, "ranks")))
        with come(pool, listener, where, (0,)):
            assert gone.fileno() == -1


def test_nothing_of_a_stranger_is_loaded(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Who knows the protocol but not the token sends events that would run code; the rank comes in all the same."""

    class Touch:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "made",)

    hostile = pickle.dumps(Touch())
    content = (1).to_bytes(4, "big") + len(hostile).to_bytes(8, "big") + hostile
    with open_listener(1) as (listener, where), contextlib.ExitStack() as stack:
        for guess in (b"", bytes(32) + b"\0\0\0\0", bytes(proof.ANSWER_BYTES)):
            stack.enter_context(socket.create_connection(where)).sendall(guess + content)
        inbox = Inbox()
        stack.callback(inbox.close)
        with come(pool, listener, where, (0,)) as ends:
            inbox.add(0, {"events": ends[0][0]})
            ends[0][1].sendall(b"".join(frame(Lines(rank=0, time=1.0, stream="stdout", texts=("hello",)))))
            assert [event.texts for event in inbox.poll(20)] == [("hello",)]  # type: ignore[attr-defined]
    assert not (tmp_path / "made").exists()
