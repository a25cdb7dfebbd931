"""Messages between the nodes of a run: a kind, a value, and bytes that are not copied, over one connection.

A value is data of the type that belongs to its kind. What a node says has no power over the code of another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from ....events import Buffer, as_bytes
from ....stream.listener import keep_alive
from ....trust import plain, proof
from ....trust.plain import MalformedError
from ....trust.proof import REPLY_BYTES, Session
from ... import descriptors
from ...supervise.stop_agreement import Questions
from .node_info import NodeInfo, Roster
from .outcomes import NodeOutcome, RestartCause
from .pulse import Pulse

PURPOSE: Final = "nodes"
_HEAD: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
_MAX_PARTS: Final = 1 << 20
_RECEIVE: Final = 1 << 20
_MAX_UNHEARD: Final = 1 << 26  # bytes
_LEAST_BYTES: Final = 1_000  # of the objects of a message

MessageKind = Literal[
    # from a node
    "node",  # I am here: (NodeInfo, attempt, whether I hold the store)
    "outcome",  # my part has ended: NodeOutcome
    "bye",  # I leave, and want nothing more
    "ended",  # my workers of this attempt have ended well, where nodes come and go: number of the attempt
    "held",  # my ranks are held: Questions
    "name",  # I am the node of this name, which nobody else has
    "pulse",  # this connection is silent from now on: without answers the node of this name is cut off; see `pulse`
    # from a node, passed on to all others
    "cause",  # why my workers start again: RestartCause
    "value",  # what rank 0 returned: time of the result, why it cannot travel, or empty; and the value as parts
    "news",  # something was heard of my ranks
    "ask",  # my ranks are silent, and I ask them where they are
    "stop",  # the ranks are to stop at one question: I hold mine
    # from the coordinator
    "present",  # these nodes are here, others are not: list of NodeInfo
    "roster",  # all are here: Roster
    "turned away",  # a node does not fit to the run: a sentence, for the cell of the node that holds the store
    "all ended",  # the workers of all nodes have ended well
    "refused",  # you cannot take part: why
    "over",  # the run has ended
    "again",  # another node starts its workers again, or is waited for: number of the attempt; whom, or empty
    "agreed",  # the ranks of all nodes are held: Questions
    "trouble",  # another node failed
    "verdict",  # why the run ended: NodeOutcome, or None for well
]


_TYPES: Final[Mapping[MessageKind, Any]] = {
    "node": tuple[NodeInfo, int, bool],
    "outcome": NodeOutcome,
    "bye": None,
    "name": str,
    "pulse": str,
    "value": tuple[float, str],
    "cause": RestartCause,
    "news": None,
    "ask": None,
    "stop": None,
    "ended": int,
    "held": Questions,
    "turned away": str,
    "all ended": None,
    "present": list[NodeInfo],
    "roster": Roster,
    "refused": str,
    "over": None,
    "again": tuple[int, str],
    "agreed": Questions,
    "trouble": None,
    "verdict": NodeOutcome | None,
}


class Message(NamedTuple):
    """What nodes and the coordinator tell each other.

    Attributes:
        kind: what it is about.
        value: what belongs to the kind; `_TYPES` says of which type it is.
        parts: bytes that are sent as they are.
    """

    kind: MessageKind
    value: Any = None
    parts: Sequence[Buffer] = ()


class Limit(NamedTuple):
    """How many bytes a peer may say in a message.

    Attributes:
        value: of the value.
        parts: of all parts together.
    """

    value: float
    parts: float


NO_LIMIT: Final = Limit(math.inf, math.inf)
MEMBER_LIMIT: Final = Limit(1 << 24, 1 << 30)
"""Of a run without a secret: nobody knows who it is that says so much."""
GUEST_LIMIT: Final = Limit(1 << 20, 0)


def encode(message: Message, session: Session | None) -> list[memoryview]:
    """Return the bytes of a message, in pieces that are not copied.

    Args:
        message: what to say.
        session: of a connection whose ends have proven a secret, else None.
    """
    value = plain.encode(_TYPES[message.kind], message.value, proven=session is not None)
    first = f'["{message.kind}", {value}]'.encode()
    views = [as_bytes(part) for part in (first, *message.parts)]
    head = _HEAD.pack(len(views)) + b"".join(_SIZE.pack(view.nbytes) for view in views)
    pieces = [memoryview(head), *views]
    return pieces if session is None else [*pieces, memoryview(session.outgoing.make_tag(pieces))]


def parse(session: Session | None, find_limit: Callable[[], Limit]) -> Generator[int, Buffer, Message]:
    """Read one message: yields how many bytes it needs next, and returns the message.

    Args:
        session: of a connection whose ends have proven a secret, else None.
        find_limit: returns how much the peer may say now.

    Raises:
        MalformedError: the bytes are no message.
        ProofError: another one than the peer has sent them.
    """
    head = bytearray((yield _HEAD.size))
    (count,) = _HEAD.unpack(head)
    limit = find_limit()
    if not 0 < count <= (_MAX_PARTS if limit.parts else 1):
        raise MalformedError(f"a message has {count} parts")
    head += yield _SIZE.size * count
    sizes = [size for (size,) in _SIZE.iter_unpack(head[_HEAD.size :])]
    if sizes[0] > limit.value or sum(sizes[1:]) > limit.parts:
        raise MalformedError(f"a message of {sum(sizes)} bytes is too long")
    parts: list[Buffer] = []
    for size in sizes:
        parts.append((yield size))
    if session is not None:
        session.incoming.check_tag(bytes((yield REPLY_BYTES)), [head, *(memoryview(part) for part in parts)])
    return _decode(parts, proven=session is not None)


def _decode(parts: Sequence[Buffer], *, proven: bool) -> Message:
    try:
        kind, value = json.loads(bytes(parts[0]))
        expected = _TYPES[kind]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MalformedError(f"a message cannot be read: {error}") from None
    if len(parts) > 1 and kind != "value":
        raise MalformedError(f"a message {kind!r} has no parts besides")
    return Message(kind, plain.load(expected, value, proven=proven), parts[1:])


async def read(
    reader: asyncio.StreamReader, session: Session | None, find_limit: Callable[[], Limit]
) -> Message:
    """Read the next message; the arguments are those of `parse`.

    Raises:
        IncompleteReadError, OSError: the peer has gone.
        MalformedError: what it sends is no message.
    """
    parsing = parse(session, find_limit)
    size = next(parsing)
    while True:
        data = await reader.readexactly(size)
        try:
            size = parsing.send(data)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class CoordinatorConnection:
    """A node's connection to the coordinator; a thread reads from it.

    Args:
        host: the coordinator's host.
        port: its port.
        key: what both ends have to know.
        timeout: seconds to wait for the connection.
        proven: whether the key is made of a secret.

    Attributes:
        peer: the coordinator's IP address.

    Raises:
        OSError: nothing listens there, or it does not know the key.
    """

    def __init__(self, host: str, port: int, key: bytes, timeout: float, *, proven: bool = False) -> None:
        self._pulse: Pulse | None = None
        self._connection, session = proof.connect((host, port), key, PURPOSE, timeout=timeout)
        self._session = session if proven else None
        keep_alive(self._connection)
        self.peer = str(self._connection.getpeername()[0])
        self._messages: deque[tuple[Message, int]] = deque()  # not heard yet, each with its bytes
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_ended = False
        self._listening = threading.Thread(target=self._listen, name="notebook_accel node", daemon=True)
        descriptors.keep_from_forks(self)
        self._listening.start()

    def start_pulse(self, host: str, port: int, key: bytes, timeout: float) -> None:
        """Notice soon, here and at the coordinator, that the network between the two machines is cut.

        Args:
            host: as for the connection.
            port: likewise.
            key: likewise.
            timeout: likewise.

        Raises:
            OSError: the coordinator is gone; this connection has ended too.
        """
        name = secrets.token_hex()
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            connection, session = proof.connect((host, port), key, PURPOSE, timeout=timeout)
            stack.callback(connection.close)
            pulse = Message("pulse", name)
            connection.sendall(b"".join(encode(pulse, session if self._session is not None else None)))
            stack.pop_all()
        self._pulse = Pulse(connection, self._give_up)
        self.say(Message("name", name))

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, and all is heard that was said before."""
        return self._has_ended and not self._messages

    def say(self, message: Message) -> bool:
        """Send a message; return False where the coordinator is gone."""
        try:
            for piece in encode(message, self._session):
                self._connection.sendall(piece)
        except OSError:
            self._give_up()
            return False
        return not self._has_ended

    def _give_up(self) -> None:
        """End the connection; whoever listens hears what has come, and then the end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def hear(self, timeout: float) -> Message | None:
        """Return the next message, None where none comes within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._messages, timeout):
                return None
            message, size = self._messages.popleft()
            self._num_bytes -= size
            self._changed.notify_all()
        return message

    def close(self) -> None:
        """End the connection."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._give_up()
        if self._pulse is not None:
            self._pulse.close()
        self._listening.join()
        self._connection.close()
        descriptors.forget(self)

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        fd = self._connection.fileno()
        return [fd] if fd >= 0 else []  # the pulse says its own

    def _listen(self) -> None:
        try:
            for message, size in self._read_messages():
                self._keep(message, size)
        except (OSError, EOFError, MalformedError):
            self._has_ended = True

    def _keep(self, message: Message, size: int) -> None:
        """Keep a message until it is heard; wait while those before it are too large together."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or not self._messages or self._num_bytes + size <= _MAX_UNHEARD
            )
            self._messages.append((message, size))
            self._num_bytes += size
            self._changed.notify_all()

    def _read_messages(self) -> Iterator[tuple[Message, int]]:
        """Yield the messages, each with its bytes."""
        while True:
            parsing = parse(self._session, lambda: MEMBER_LIMIT if self._session is None else NO_LIMIT)
            size = next(parsing)
            total = _LEAST_BYTES
            while True:
                data = self._read(size)
                total += size
                try:
                    size = parsing.send(data)
                except StopIteration as end:
                    yield end.value, total
                    break

    def _read(self, size: int) -> bytearray:
        """Return so many bytes; the memory for them grows with those that have come."""
        data, filled = bytearray(min(size, _RECEIVE)), 0
        while filled < size:
            if filled == len(data):
                data += bytes(min(size - filled, filled))
            with memoryview(data)[filled:] as rest:
                count = self._connection.recv_into(rest)
            if not count:
                raise EOFError
            filled += count
        return data
