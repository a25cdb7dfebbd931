"""The proof that both ends of a connection know a key, and the tags of what they say afterwards.

The end that listens sends a nonce. The other end answers with a nonce of its own and a tag of both, the listening end
with another tag. All of it has fixed lengths, so nothing that a stranger says is interpreted. A recorded answer is of
no use, because each connection has new nonces.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

KEY_BYTES: Final = 32
GREETING_BYTES: Final = 32
_TAG_BYTES: Final = 32
_CLAIM: Final = struct.Struct("!I")
_COUNT: Final = struct.Struct("!Q")
ANSWER_BYTES: Final = GREETING_BYTES + _CLAIM.size + _TAG_BYTES
REPLY_BYTES: Final = _TAG_BYTES


class ProofError(ConnectionError):
    """The other end does not know the key, or what came is not what it sent."""


def make_key() -> bytes:
    """Return a new key."""
    return secrets.token_bytes(KEY_BYTES)


class Seal:
    """The tags of the frames that one end sends, in their order.

    Args:
        key: of this connection and direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def make_tag(self, pieces: Iterable[memoryview | bytes | bytearray]) -> bytes:
        """Return the tag of the next frame.

        Args:
            pieces: all bytes of the frame.
        """
        digest = self.begin()
        for piece in pieces:
            digest.update(piece)
        return digest.digest()

    def begin(self) -> hmac.HMAC:
        """Return the tag of the next frame, to be updated with all bytes of it."""
        digest = hmac.new(self._key, _COUNT.pack(self._count), "sha256")
        self._count += 1
        return digest

    def check_tag(self, tag: bytes | bytearray, pieces: Iterable[memoryview | bytes | bytearray]) -> None:
        """Check the tag of the next frame; ProofError where it is not the right one."""
        if not hmac.compare_digest(self.make_tag(pieces), bytes(tag)):
            raise ProofError("a frame does not have the tag of its connection")


class Session(NamedTuple):
    """The tags of a connection whose ends have proven themselves.

    Attributes:
        outgoing: of what this end sends.
        incoming: of what this end receives.
    """

    outgoing: Seal
    incoming: Seal


class Acceptance(NamedTuple):
    """What the listening end has after a right answer.

    Attributes:
        claim: the number that the other end named with its proof: a rank.
        reply: the bytes to send.
        session: for what follows; None where nothing of it is proven.
    """

    claim: int
    reply: bytes
    session: Session | None


class Challenge:
    """The proof at the end that listens.

    Args:
        key: what both ends know.
        purpose: what the connection is for; a proof for one purpose is none for another.

    Attributes:
        greeting: the bytes to send first.
    """

    def __init__(self, key: bytes, purpose: str) -> None:
        self._key = key
        self._purpose = purpose
        self.greeting = secrets.token_bytes(GREETING_BYTES)

    def accept(self, answer: bytes | bytearray) -> Acceptance:
        """Check the answer to the greeting.

        Args:
            answer: `ANSWER_BYTES` of the other end.

        Raises:
            ProofError: the other end does not know the key.
        """
        content, tag = bytes(answer[:-_TAG_BYTES]), bytes(answer[-_TAG_BYTES:])
        said = self.greeting + content
        if not hmac.compare_digest(_make_tag(self._key, self._purpose, "answer", said), tag):
            raise ProofError("the other end does not know the key of this run")
        (claim,) = _CLAIM.unpack(content[GREETING_BYTES:])
        to_connect, to_listen = _make_seals(self._key, self._purpose, said)
        reply = _make_tag(self._key, self._purpose, "reply", said)
        return Acceptance(claim, reply, Session(outgoing=to_connect, incoming=to_listen))


class Answer:
    """The proof at the end that connects.

    Args:
        key: what both ends know.
        purpose: see `Challenge`.
        greeting: the first `GREETING_BYTES` of the listening end.
        claim: a number that the proof is about, such as a rank.

    Attributes:
        content: the bytes to send.
    """

    def __init__(self, key: bytes, purpose: str, greeting: bytes, claim: int = 0) -> None:
        self._key = key
        self._purpose = purpose
        own = secrets.token_bytes(GREETING_BYTES) + _CLAIM.pack(claim)
        self._said = greeting + own
        self.content = own + _make_tag(key, purpose, "answer", self._said)

    def check(self, reply: bytes | bytearray) -> Session:
        """Check the listening end's proof, `REPLY_BYTES`.

        Raises:
            ProofError: the listening end does not know the key.
        """
        if not hmac.compare_digest(_make_tag(self._key, self._purpose, "reply", self._said), bytes(reply)):
            raise ProofError("what listens there does not know the key of this run")
        to_connect, to_listen = _make_seals(self._key, self._purpose, self._said)
        return Session(outgoing=to_listen, incoming=to_connect)


def connect(
    endpoint: tuple[str, int], key: bytes, purpose: str, *, claim: int = 0, timeout: float
) -> tuple[socket.socket, Session]:
    """Connect to a listening socket of the run, and prove both ends.

    Args:
        endpoint: host and port.
        key: what both ends know.
        purpose: what the connection is for.
        claim: a number that the proof is about, such as a rank.
        timeout: seconds to wait for each thing that the listening end does.

    Returns:
        The connection, which has no timeout, and the tags of what follows.

    Raises:
        OSError: nobody answers, or not in time; ProofError where the other end does not know the key.
    """
    connection = socket.create_connection(endpoint, timeout)
    try:
        session = answer(connection, key, purpose, claim=claim)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    return connection, session


def answer(connection: socket.socket, key: bytes, purpose: str, *, claim: int = 0) -> Session:
    """Prove both ends of a connection, at the one that connected; the arguments are those of `connect`.

    Raises:
        OSError: the other end is gone, or silent; ProofError where it does not know the key.
    """
    try:
        said = Answer(key, purpose, _read(connection, GREETING_BYTES), claim)
        connection.sendall(said.content)
        return said.check(_read(connection, REPLY_BYTES))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise ProofError("what listens there ends the connection") from None


def challenge(connection: socket.socket, key: bytes, purpose: str) -> Acceptance:
    """Prove both ends of a connection, at the one that listened.

    Raises:
        OSError: the other end is gone, or silent; ProofError where it does not know the key.
    """
    asked = Challenge(key, purpose)
    connection.sendall(asked.greeting)
    try:
        acceptance = asked.accept(_read(connection, ANSWER_BYTES))
    except EOFError:
        raise ProofError("the other end ends the connection") from None
    connection.sendall(acceptance.reply)
    return acceptance


def _read(connection: socket.socket, size: int) -> bytes:
    """Return so many bytes; EOFError where the other end has ended the connection."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _make_seals(key: bytes, purpose: str, said: bytes) -> tuple[Seal, Seal]:
    """Return the tags of what goes to the end that connects, and to the end that listens."""
    return Seal(_make_tag(key, purpose, "to connect", said)), Seal(_make_tag(key, purpose, "to listen", said))


def _make_tag(key: bytes, purpose: str, role: str, content: bytes) -> bytes:
    label = f"notebook_accel 1\0{purpose}\0{role}\0".encode()
    return hmac.digest(key, label + content, "sha256")
