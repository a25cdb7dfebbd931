"""One end of a connection between a node and the coordinator.

A thread reads it and another one writes it, so that neither who says something nor who hears it waits for the network.
Both ends speak twice a second. A machine whose system acknowledges nothing of it for 14 s is cut off: what was lost in
an outage of ten seconds is sent again after 12.6 s at most (RFC 6298, from Linux's least time-out of 0.2 s). A process
that is silent has a minute, because a cell may hold Python's lock; without TCP_USER_TIMEOUT it has 14 s.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Any, Final

from ....stream.listener import keep_alive
from ....trust import proof
from ....trust.plain import MalformedError
from ....trust.proof import Acceptance, ProofError, Session
from ....trust.secret import HOW, Trust
from ... import descriptors
from . import messages
from .messages import BEAT, PIECE_BYTES, Limit, Message

PURPOSE: Final = "nodes"
_GREETINGS: Final = {False: b"o", True: b"s"}  # the first byte of a coordinator: whether its run has a secret
_BEAT_SECONDS: Final = 0.5
_CUT_SECONDS: Final = 14
_SILENCE_SECONDS: Final = 60.0 if hasattr(socket, "TCP_USER_TIMEOUT") else _CUT_SECONDS + 0.5
_MOST_UNHEARD: Final = 16  # messages that wait for who hears them; then nothing more is read
_MOST_UNREAD: Final = 64  # messages that wait for a peer; then it is dropped
_PAUSE_SECONDS: Final = 0.001


class NodeLink:
    """One end of such a connection.

    Args:
        connection: its ends have proven themselves.
        session: the tags of what follows; None where there is no secret.
        inbox: gets this link with each message of the peer, and at last with None.
        limit: how much the peer may say in a message.

    Attributes:
        limit: as given; it may be raised.
        address: the peer's IP address.
    """

    def __init__(
        self,
        connection: socket.socket,
        session: Session | None,
        inbox: queue.SimpleQueue[Any],
        limit: Limit,
    ) -> None:
        connection.settimeout(_SILENCE_SECONDS)
        keep_alive(connection, _CUT_SECONDS - 2, 1, 2)
        self.limit = limit
        self.address = str(connection.getpeername()[0])
        self._connection, self._session, self._inbox = connection, session, inbox
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=work, name="notebook_accel node", daemon=True)
            for work in (self._speak, self._listen)  # the end of the second one may be the end of both
        ]
        descriptors.keep_from_forks(self)

    def start(self) -> None:
        """Begin to hear and to speak; where the system gives no more threads, it ends."""
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self.end()
            self._inbox.put((self, None))

    def say(self, message: Message) -> None:
        """Send a message; never waits. A peer that does not read what it was sent is dropped."""
        self._outbox.put(message)
        if self._outbox.qsize() > _MOST_UNREAD:
            self.end()

    def end(self) -> None:
        """End the connection at once; what has come is still heard."""
        shut(self._connection)

    def close(self, seconds: float = 0.0) -> None:
        """End the connection, once the peer has what was said, for which it has some seconds."""
        self._is_closed = True
        self._outbox.put(None)
        deadline = time.monotonic() + seconds
        running = [thread for thread in self._threads if thread.is_alive()]
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.end()
        for thread in running:
            thread.join()
        self._connection.close()
        descriptors.forget(self)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        fd = self._connection.fileno()
        return [fd] if fd >= 0 else []

    def _listen(self) -> None:
        try:
            while True:
                message = messages.read(self._read, self._session, lambda: self.limit)
                while self._inbox.qsize() >= _MOST_UNHEARD and not self._is_closed:
                    time.sleep(_PAUSE_SECONDS)
                if message is not None and not self._is_closed:
                    self._inbox.put((self, message))
        except (OSError, EOFError, MalformedError, MemoryError):
            pass
        finally:
            self.end()  # so that the other thread ends, too
            self._inbox.put((self, None))

    def _read(self, size: int) -> bytearray:
        """Return so many bytes; the memory for them grows with those that have come, where anybody may send them."""
        data, filled = bytearray(size if self._session is not None else min(size, PIECE_BYTES)), 0
        while filled < size:
            if filled == len(data):
                data += bytes(min(size - filled, filled))
            with memoryview(data)[filled:] as rest:
                count = self._connection.recv_into(rest)
            if not count:
                raise EOFError
            filled += count
        return data

    def _speak(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                try:
                    message = self._outbox.get(timeout=_BEAT_SECONDS)
                except queue.Empty:
                    self._connection.sendall(BEAT)
                    continue
                if message is None:
                    self._connection.shutdown(socket.SHUT_WR)  # and hear until the peer does so, too
                    return
                for piece in messages.encode(message, self._session):
                    self._connection.sendall(piece)
        self.end()


def connect(
    host: str, port: int, trust: Trust, seconds: float, claim: int = 0
) -> tuple[socket.socket, Session | None]:
    """Connect to the coordinator that listens somewhere, and prove both ends.

    Args:
        host: where it listens.
        port: likewise.
        trust: the secret of the run.
        seconds: for each thing that the coordinator does.
        claim: the number of the coordinator's own node.

    Raises:
        OSError: nothing listens there, or no coordinator of this run; SilentError where it says nothing.
    """
    connection = socket.create_connection((host, port), seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(connection.close)
        try:
            greeting = connection.recv(1)
        except TimeoutError:
            raise SilentError(f"what listens at {host}:{port} says nothing") from None
        if greeting != _GREETINGS[trust.is_proven]:
            raise ProofError(_describe_greeting(greeting))
        try:
            session = proof.answer(connection, trust.key, PURPOSE, claim=claim)
        except ProofError as error:
            another = "the run there has another secret than this node"
            raise ProofError(another if trust.is_proven else str(error)) from None
        stack.pop_all()
    return connection, session if trust.is_proven else None


class SilentError(ConnectionError):
    """Something listens, and does not speak as a coordinator does."""


def _describe_greeting(greeting: bytes) -> str:
    if greeting == _GREETINGS[True]:
        return f"the run there has a secret, and this node has none: {HOW}"
    if greeting == _GREETINGS[False]:
        return f"this node has a secret, and the run there has none: {HOW}"
    return "what listens there is no run of this version"


def welcome(connection: socket.socket, trust: Trust, seconds: float) -> Acceptance:
    """Prove both ends to each other, at the coordinator's.

    Args:
        connection: just accepted.
        trust: the secret of the run.
        seconds: for the answer.

    Returns:
        What the other end claims, and the session, None where there is no secret.

    Raises:
        OSError: it has gone, or does not know the secret.
    """
    connection.settimeout(seconds)
    connection.sendall(_GREETINGS[trust.is_proven])
    accepted = proof.challenge(connection, trust.key, PURPOSE)
    return accepted if trust.is_proven else accepted._replace(session=None)


def shut(connection: socket.socket) -> None:
    """End a connection; whoever reads it notices."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
