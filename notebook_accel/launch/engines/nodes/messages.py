"""Messages between the nodes of a run: a kind, a value, and bytes that are not copied, over one connection."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

from ....events import Buffer

TOKEN_BYTES: Final = 32
_HEAD: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
_SILENT_SECONDS: Final = 35
"""After which a peer that answers no packet is lost; a link that is away for ten seconds is none."""


MessageKind = Literal[
    # from a node
    "node",  # I am here: (NodeInfo, attempt, whether I hold the store)
    "outcome",  # my part has ended: NodeOutcome
    "bye",  # I leave, and want nothing more
    # from a node, passed on to all others
    "value",  # what rank 0 returned: time of the result, the pickle and its buffers as parts
    "news",  # something was heard of my ranks
    "ask",  # my ranks are silent, and I ask them where they are
    # from the coordinator
    "present",  # these nodes are here, others are not: list of NodeInfo
    "roster",  # all are here: Roster
    "refused",  # you cannot take part: why
    "over",  # the run has ended
    "again",  # another node starts its workers again: number of the attempt
    "trouble",  # another node failed
    "verdict",  # why the run ended: NodeOutcome, or None for well
]


class Message(NamedTuple):
    """What nodes and the coordinator tell each other.

    Attributes:
        kind: what it is about.
        value: what belongs to the kind, pickled on its way.
        parts: bytes that are sent as they are.
    """

    kind: MessageKind
    value: Any = None
    parts: Sequence[Buffer] = ()


def encode(message: Message) -> list[memoryview]:
    """Return the bytes of a message, in pieces that are not copied."""
    first = pickle.dumps((message.kind, message.value))
    views = [memoryview(part).cast("B") for part in (first, *message.parts)]
    head = _HEAD.pack(len(views)) + b"".join(_SIZE.pack(view.nbytes) for view in views)
    return [memoryview(head), *views]


def _decode(parts: Sequence[Buffer]) -> Message:
    kind, value = pickle.loads(parts[0])
    return Message(kind, value, parts[1:])


async def read(reader: asyncio.StreamReader) -> Message:
    """Read the next message; IncompleteReadError or OSError where the peer has gone."""
    (count,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    sizes = [_SIZE.unpack(await reader.readexactly(_SIZE.size))[0] for _ in range(count)]
    return _decode([await reader.readexactly(size) for size in sizes])


def keep_alive(connection: socket.socket) -> None:
    """Have the system notice within about half a minute that the peer's machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    for name, value in {**seconds, "TCP_USER_TIMEOUT": _SILENT_SECONDS * 1000}.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class CoordinatorConnection:
    """A node's connection to the coordinator; a thread reads from it.

    Args:
        host: the coordinator's host.
        port: its port.
        token: what it lets nodes in by.
        timeout: seconds to wait for the connection.

    Attributes:
        peer: the coordinator's IP address.
        is_lost: whether the connection has ended.

    Raises:
        OSError: nothing listens there.
    """

    def __init__(self, host: str, port: int, token: bytes, timeout: float) -> None:
        self._connection = socket.create_connection((host, port), timeout)
        self._connection.settimeout(None)
        keep_alive(self._connection)
        self.peer = str(self._connection.getpeername()[0])
        self._connection.sendall(token)
        self._messages: queue.Queue[Message] = queue.Queue()
        self.is_lost = False
        self._listening = threading.Thread(target=self._listen, name="notebook_accel node", daemon=True)
        self._listening.start()

    def say(self, message: Message) -> bool:
        """Send a message; return False where the coordinator is gone."""
        try:
            for piece in encode(message):
                self._connection.sendall(piece)
        except OSError:
            self.is_lost = True
        return not self.is_lost

    def hear(self, timeout: float) -> Message | None:
        """Return the next message, None where none comes within `timeout` seconds."""
        try:
            return self._messages.get(timeout=timeout) if timeout > 0 else self._messages.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._listening.join()
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                (count,) = _HEAD.unpack(self._read(_HEAD.size))
                sizes = [_SIZE.unpack(self._read(_SIZE.size))[0] for _ in range(count)]
                self._messages.put(_decode([self._read(size) for size in sizes]))
        except (OSError, EOFError):
            self.is_lost = True

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view.nbytes:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data
