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
from typing import Any, Final, NamedTuple

from ....events import Buffer

TOKEN_BYTES: Final = 32
_HEAD: Final = struct.Struct("<I")
_SIZE: Final = struct.Struct("<Q")
_SILENT_SECONDS: Final = 35
"""After which a peer that answers no packet is lost; a link that is away for ten seconds is none."""


class Message(NamedTuple):
    """What a node says: `parts` are bytes that go along."""

    kind: str
    value: Any = None
    parts: Sequence[Buffer] = ()


def packed(message: Message) -> list[memoryview]:
    """Return the bytes of a message, in pieces."""
    first = pickle.dumps((message.kind, message.value))
    views = [memoryview(part).cast("B") for part in (first, *message.parts)]
    head = _HEAD.pack(len(views)) + b"".join(_SIZE.pack(view.nbytes) for view in views)
    return [memoryview(head), *views]


def _made(parts: Sequence[Buffer]) -> Message:
    kind, value = pickle.loads(parts[0])
    return Message(kind, value, parts[1:])


async def read(reader: asyncio.StreamReader) -> Message:
    """Read the next message; IncompleteReadError or OSError where the peer has gone."""
    (count,) = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    sizes = [_SIZE.unpack(await reader.readexactly(_SIZE.size))[0] for _ in range(count)]
    return _made([await reader.readexactly(size) for size in sizes])


def keep_alive(connection: socket.socket) -> None:
    """Have the system find out, half a minute late, that a peer's machine is gone, where it can."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = {"TCP_KEEPIDLE": 15, "TCP_KEEPALIVE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
    for name, value in {**seconds, "TCP_USER_TIMEOUT": _SILENT_SECONDS * 1000}.items():
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Spoke:
    """A node's connection to the hub: says and hears messages; a thread listens.

    Attributes:
        peer: the hub's address.
        lost: whether the connection has ended.
    """

    def __init__(self, host: str, port: int, token: bytes, timeout: float) -> None:
        self._connection = socket.create_connection((host, port), timeout)
        self._connection.settimeout(None)
        keep_alive(self._connection)
        self.peer = str(self._connection.getpeername()[0])
        self._connection.sendall(token)
        self._heard: queue.Queue[Message] = queue.Queue()
        self.lost = False
        self._listening = threading.Thread(target=self._listen, name="notebook_accel node", daemon=True)
        self._listening.start()

    def say(self, message: Message) -> bool:
        """Send a message; False where the hub has gone."""
        try:
            for piece in packed(message):
                self._connection.sendall(piece)
        except OSError:
            self.lost = True
        return not self.lost

    def hear(self, timeout: float) -> Message | None:
        """Return the next message, None where none comes in time."""
        try:
            return self._heard.get(timeout=timeout) if timeout > 0 else self._heard.get_nowait()
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
                self._heard.put(_made([self._read(size) for size in sizes]))
        except (OSError, EOFError):
            self.lost = True

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view.nbytes:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data
