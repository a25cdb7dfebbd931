"""Lets workers on other machines connect to the notebook; each proves first that it belongs to the attempt."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from ..trust import proof
from ..trust.proof import Challenge

_PURPOSE: Final = "ranks"
_PROOF_SECONDS: Final = 10.0
_MAX_PENDING: Final = 256
"""Connections without a proof, besides one of each rank. Beyond it the oldest one makes room."""


def connect(endpoint: tuple[str, int], token: bytes, rank: int, timeout: float) -> socket.socket:
    """Connect a worker to the notebook.

    Args:
        endpoint: address and port of the listener.
        token: of the listener; it is not sent.
        rank: of the worker.
        timeout: seconds to wait for the connection.

    Raises:
        OSError: nobody answers, or somebody who does not know the token.
    """
    connection, _ = proof.connect(endpoint, token, _PURPOSE, claim=rank, timeout=timeout)
    keep_alive(connection)
    return connection


def keep_alive(connection: socket.socket, idle: int = 15, interval: int = 5, count: int = 4) -> None:
    """Let the system notice, by default within 35 s, that the other machine is down; send small frames at once.

    Args:
        connection: of TCP.
        idle: seconds of silence before the first question.
        interval: seconds between two questions.
        count: of questions without an answer, after which the connection ends. What was sent has the same time.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": idle,
        "TCP_KEEPALIVE": idle,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": count,
        "TCP_USER_TIMEOUT": (idle + interval * count)
        * 1000,  # nothing is asked while sent bytes wait for their answer
    }
    for name, value in values.items():
        if hasattr(socket, name):  # not on every system
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(eq=False)
class _Pending:
    """A connection that has proven nothing yet.

    Attributes:
        connection: it does not block.
        challenge: what it has to answer.
        received: the answer so far.
        deadline: until when it may answer.
    """

    connection: socket.socket
    challenge: Challenge
    received: bytearray = field(default_factory=bytearray)
    deadline: float = field(default_factory=lambda: time.monotonic() + _PROOF_SECONDS)


class Listener:
    """Listens for the ranks of one attempt. Each rank connects once, and proves a token that only this attempt knows.

    Args:
        listening: a bound socket that listens.
        ranks: number of ranks.

    Attributes:
        token: what a connection has to prove, before anything of it is read.
    """

    def __init__(self, listening: socket.socket, ranks: int) -> None:
        self.token = proof.make_key()
        self._listening = listening
        self._listening.setblocking(False)
        self._missing = set(range(ranks))
        self._max_pending = _MAX_PENDING + ranks
        self._pending: list[_Pending] = []  # oldest first

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
        admitted = self._read_answers()  # before newcomers push anyone out
        for _ in range(self._max_pending):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                break
            except ConnectionError:
                continue  # it was closed before it was accepted
            except OSError:
                if not self._pending:
                    raise
                self._drop(self._pending[0])  # too many files are open
                continue
            self._greet(connection)
        return admitted + self._read_answers()

    def close(self) -> None:
        """Stop listening, and close connections that have proven nothing."""
        self._listening.close()
        for pending in list(self._pending):
            self._drop(pending)

    def _greet(self, connection: socket.socket) -> None:
        if len(self._pending) >= self._max_pending:
            self._drop(self._pending[0])
        pending = _Pending(connection, Challenge(self.token, _PURPOSE))
        connection.setblocking(False)
        self._pending.append(pending)
        with contextlib.suppress(OSError):  # it has gone, and reading it says so
            connection.send(pending.challenge.greeting)  # a new connection takes so few bytes at once

    def _read_answers(self) -> list[tuple[int, socket.socket]]:
        """Return the connections that have proven their rank; drop those that cannot do so any more."""
        admitted = []
        for pending in list(self._pending):
            try:
                rank = self._read_answer(pending)
                if rank is not None:
                    keep_alive(pending.connection)
                    self._missing.discard(rank)
            except OSError:  # a wrong answer, a reset, or the other machine is down
                self._drop(pending)
                continue
            if rank is not None:
                self._pending.remove(pending)
                admitted.append((rank, pending.connection))
        return admitted

    def _read_answer(self, pending: _Pending) -> int | None:
        """Return the rank of a connection, None while it may still answer; OSError where it does not."""
        try:
            data = pending.connection.recv(proof.ANSWER_BYTES - len(pending.received))
        except BlockingIOError:
            if time.monotonic() > pending.deadline:
                raise TimeoutError("no answer") from None
            return None
        if not data:
            raise ConnectionResetError("the connection has ended")
        pending.received += data
        if len(pending.received) < proof.ANSWER_BYTES:
            return None
        acceptance = pending.challenge.accept(pending.received)
        if acceptance.claim not in self._missing:
            raise proof.ProofError(f"rank {acceptance.claim} is not missing")
        pending.connection.send(acceptance.reply)
        return acceptance.claim

    def _drop(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        pending.connection.close()
