"""Who may connect to the notebook."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from notebook_accel.launch.checks import addresses
from notebook_accel.stream.listener import Listener, connect


@contextlib.contextmanager
def open_listener(ranks: int) -> Iterator[tuple[Listener, tuple[str, int]]]:
    listener = Listener(addresses.listen("127.0.0.1", 0), ranks)
    try:
        yield listener, ("127.0.0.1", listener.port)
    finally:
        listener.close()


def admit(listener: Listener, seconds: float = 0.3) -> list[tuple[int, socket.socket]]:
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found += listener.admit()
        time.sleep(0.01)
    return found


def is_dropped(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_each_rank_comes_in_once() -> None:
    with open_listener(2) as (listener, where), contextlib.ExitStack() as stack:
        for rank in (1, 0):
            stack.enter_context(connect(where, listener.token, rank, 5))
        found = admit(listener)
        for _, connection in found:
            stack.enter_context(connection)
        assert sorted(rank for rank, _ in found) == [0, 1] and not listener.missing
        again = stack.enter_context(connect(where, listener.token, 1, 5))
        assert admit(listener) == [] and is_dropped(again)


@pytest.mark.parametrize("rank", [0, 7])
def test_without_the_token_nobody_does(rank: int) -> None:
    with open_listener(1) as (listener, where):
        token = (
            b"x" * len(listener.token) if rank == 0 else listener.token
        )  # no such rank: the token does not help
        with connect(where, token, rank, 5) as stranger:
            assert admit(listener) == [] and is_dropped(stranger)
        assert listener.missing == {0}


def test_a_handshake_may_come_in_pieces() -> None:
    with open_listener(1) as (listener, where), socket.create_connection(where) as slow:
        handshake = listener.token + struct.pack("!I", 0)
        slow.sendall(handshake[:20])
        assert admit(listener) == []
        slow.sendall(handshake[20:])
        ((rank, connection),) = admit(listener)
        connection.close()
        assert rank == 0


def test_what_comes_after_the_handshake_is_left_for_the_reader() -> None:
    with open_listener(1) as (listener, where), connect(where, listener.token, 0, 5) as rank:
        rank.sendall(b"frames")
        ((_, connection),) = admit(listener)
        with connection:
            assert connection.recv(100) == b"frames"


def test_a_closed_listener_drops_who_waits() -> None:
    with open_listener(1) as (listener, where), socket.create_connection(where) as silent:
        assert admit(listener) == []
        listener.close()
        assert is_dropped(silent)
        with pytest.raises(OSError):
            socket.create_connection(where, timeout=5)


def test_a_stranger_whose_machine_is_down_stops_nobody() -> None:
    """The system then says that the connection timed out, which takes minutes to bring about."""

    class Gone(socket.socket):
        def recv(self, *_: object) -> bytes:
            raise TimeoutError(110, "Connection timed out")

    with open_listener(1) as (listener, where), connect(where, listener.token, 0, 5):
        gone = Gone()
        listener._pending[gone] = (bytearray(), time.monotonic() + 10)
        ((rank, connection),) = admit(listener)
        assert rank == 0 and gone.fileno() == -1
        connection.close()
