"""Who may connect to the notebook."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from notebook_accel.launch import addresses
from notebook_accel.stream.door import Door, knock


@contextlib.contextmanager
def opened(ranks: int) -> Iterator[tuple[Door, tuple[str, int]]]:
    door = Door(addresses.listen("127.0.0.1", 0), ranks)
    try:
        yield door, ("127.0.0.1", door.port)
    finally:
        door.close()


def admitted(door: Door, seconds: float = 0.3) -> list[tuple[int, socket.socket]]:
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found += door.admit()
        time.sleep(0.01)
    return found


def is_dropped(connection: socket.socket) -> bool:
    connection.settimeout(5)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_each_rank_comes_in_once() -> None:
    with opened(2) as (door, where), contextlib.ExitStack() as stack:
        for rank in (1, 0):
            stack.enter_context(knock(where, door.token, rank, 5))
        found = admitted(door)
        for _, connection in found:
            stack.enter_context(connection)
        assert sorted(rank for rank, _ in found) == [0, 1] and not door.missing
        again = stack.enter_context(knock(where, door.token, 1, 5))
        assert admitted(door) == [] and is_dropped(again)


@pytest.mark.parametrize("rank", [0, 7])
def test_without_the_token_nobody_does(rank: int) -> None:
    with opened(1) as (door, where):
        token = b"x" * len(door.token) if rank == 0 else door.token  # no such rank: the token does not help
        with knock(where, token, rank, 5) as stranger:
            assert admitted(door) == [] and is_dropped(stranger)
        assert door.missing == {0}


def test_a_hello_may_come_in_pieces() -> None:
    with opened(1) as (door, where), socket.create_connection(where) as slow:
        hello = door.token + struct.pack("!I", 0)
        slow.sendall(hello[:20])
        assert admitted(door) == []
        slow.sendall(hello[20:])
        ((rank, connection),) = admitted(door)
        connection.close()
        assert rank == 0


def test_what_comes_after_the_hello_is_left_for_the_reader() -> None:
    with opened(1) as (door, where), knock(where, door.token, 0, 5) as rank:
        rank.sendall(b"frames")
        ((_, connection),) = admitted(door)
        with connection:
            assert connection.recv(100) == b"frames"


def test_a_closed_door_drops_who_waits() -> None:
    with opened(1) as (door, where), socket.create_connection(where) as silent:
        assert admitted(door) == []
        door.close()
        assert is_dropped(silent)
        with pytest.raises(OSError):
            socket.create_connection(where, timeout=5)


def test_a_stranger_whose_machine_is_gone_stops_nobody() -> None:
    """The system then says that the connection timed out, which takes minutes to bring about."""

    class Gone(socket.socket):
        def recv(self, *_: object) -> bytes:
            raise TimeoutError(110, "Connection timed out")

    with opened(1) as (door, where), knock(where, door.token, 0, 5):
        gone = Gone()
        door._waiting[gone] = (bytearray(), time.monotonic() + 10)
        ((rank, connection),) = admitted(door)
        assert rank == 0 and gone.fileno() == -1
        connection.close()
