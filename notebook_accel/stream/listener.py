"""Lets workers on other machines connect to the notebook; each sends a token first."""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Final

_TOKEN_BYTES: Final = 32
_RANK: Final = struct.Struct("!I")
_HANDSHAKE_BYTES: Final = _TOKEN_BYTES + _RANK.size
_HANDSHAKE_SECONDS: Final = 10.0
_MAX_PENDING: Final = (
    256  # connections that have sent no token yet; without a limit anybody could open any number
)
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


def connect(endpoint: tuple[str, int], token: bytes, rank: int, timeout: float) -> socket.socket:
    """Connect a worker to the notebook.

    Args:
        endpoint: address and port of the listener.
        token: of the listener.
        rank: of the worker.
        timeout: seconds to wait for the connection.

    Raises:
        OSError: nobody answers.
    """
    connection = socket.create_connection(endpoint, timeout)
    connection.sendall(token + _RANK.pack(rank))
    connection.settimeout(None)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket) -> None:
    """Let the system notice within about half a minute that the other machine is down; send small frames at once.

    Args:
        connection: of TCP.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Listener:
    """Listens for the ranks of one attempt. Each rank connects once, with a token that only this attempt knows.

    Args:
        listening: a bound socket that listens.
        ranks: number of ranks.

    Attributes:
        token: what a connection has to send, before its rank.
    """

    def __init__(self, listening: socket.socket, ranks: int) -> None:
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._listening = listening
        self._listening.setblocking(False)
        self._missing = set(range(ranks))
        self._pending: dict[socket.socket, tuple[bytearray, float]] = {}

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._listening.getsockname()[1])

    @property
    def missing(self) -> frozenset[int]:
        """The ranks that have not connected."""
        return frozenset(self._missing)

    def admit(self) -> list[tuple[int, socket.socket]]:
        """Return the ranks that have connected since the last call, with their connections. It never waits."""
        while len(self._pending) < _MAX_PENDING:
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # it was closed before it was accepted
            connection.setblocking(False)
            self._pending[connection] = (bytearray(), time.monotonic() + _HANDSHAKE_SECONDS)
        admitted = []
        for connection in list(self._pending):
            rank = self._read_handshake(connection)
            if rank is not None:
                keep_alive(connection)
                admitted.append((rank, connection))
        return admitted

    def close(self) -> None:
        """Stop listening, and close connections that have sent no token."""
        self._listening.close()
        for connection in self._pending:
            connection.close()
        self._pending.clear()

    def _read_handshake(self, connection: socket.socket) -> int | None:
        """Return the rank of a connection that has sent the token; close one that cannot send it any more."""
        received, deadline = self._pending[connection]
        try:
            data = connection.recv(_HANDSHAKE_BYTES - len(received))
        except BlockingIOError:
            if time.monotonic() > deadline:
                self._drop(connection)
            return None
        except OSError:  # the connection was reset, or the other machine is down
            data = b""
        received += data
        if not data:
            self._drop(connection)
        elif len(received) == _HANDSHAKE_BYTES:
            (rank,) = _RANK.unpack(received[_TOKEN_BYTES:])
            if hmac.compare_digest(bytes(received[:_TOKEN_BYTES]), self.token) and rank in self._missing:
                self._missing.discard(rank)
                del self._pending[connection]
                return int(rank)
            self._drop(connection)
        return None

    def _drop(self, connection: socket.socket) -> None:
        del self._pending[connection]
        connection.close()
