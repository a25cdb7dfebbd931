"""Where workers on other machines connect to the notebook, each by a token that it shows first."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Final

_TOKEN_BYTES: Final = 32
_RANK: Final = struct.Struct("!I")
_HELLO_BYTES: Final = _TOKEN_BYTES + _RANK.size
_HELLO_SECONDS: Final = 10.0
_MAX_WAITING: Final = 256  # connections that have not shown a token yet: more could be held open by anybody
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def knock(endpoint: tuple[str, int], token: bytes, rank: int, timeout: float) -> socket.socket:
    """In whoever holds a worker: connect as this rank; OSError where nobody answers."""
    connection = socket.create_connection(endpoint, timeout)
    connection.sendall(token + _RANK.pack(rank))
    connection.settimeout(None)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Let the system notice within about half a minute that the other machine is gone; send small frames at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Door:
    """Listens for the ranks of one attempt, and lets each in once, by a token that only this attempt knows.

    Attributes:
        token: what a connection has to show, before its rank.
    """

    def __init__(self, listening: socket.socket, ranks: int) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._listening = listening
        self._listening.setblocking(False)
        self._missing = set(range(ranks))
        self._waiting: dict[socket.socket, tuple[bytearray, float]] = {}

    @property
    def port(self) -> int:
        """Return the port that it listens at."""
        return int(self._listening.getsockname()[1])

    @property
    def missing(self) -> frozenset[int]:
        """Return the ranks that have not come."""
        return frozenset(self._missing)

    def admit(self) -> list[tuple[int, socket.socket]]:
        """Return the ranks that have come since the last call, with their connections; never waits."""
        while len(self._waiting) < _MAX_WAITING:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # gone before it was accepted
            connection.setblocking(False)
            self._waiting[connection] = (bytearray(), time.monotonic() + _HELLO_SECONDS)
        admitted = []
        for connection in list(self._waiting):
            rank = self._greet(connection)
            if rank is not None:
                keep_alive(connection)
                admitted.append((rank, connection))
        return admitted

    def close(self) -> None:
        """Stop to listen, and drop who has not shown the token."""
        self._listening.close()
        for connection in self._waiting:
            connection.close()
        self._waiting.clear()

    def _greet(self, connection: socket.socket) -> int | None:
        """Return the rank of a connection that has shown the token; drop one that cannot any more."""
        hello, deadline = self._waiting[connection]
        try:
            data = connection.recv(_HELLO_BYTES - len(hello))
        except BlockingIOError:
            if time.monotonic() > deadline:
                self._drop(connection)
            return None
        except OSError:  # reset, or its machine is gone
            data = b""
        hello += data
        if not data:
            self._drop(connection)
        elif len(hello) == _HELLO_BYTES:
            (rank,) = _RANK.unpack(hello[_TOKEN_BYTES:])
            if hmac.compare_digest(bytes(hello[:_TOKEN_BYTES]), self.token) and rank in self._missing:
                self._missing.discard(rank)
                del self._waiting[connection]
                return int(rank)
            self._drop(connection)
        return None

    def _drop(self, connection: socket.socket) -> None:
        del self._waiting[connection]
        connection.close()
