"""The actor of one rank under Ray: it starts the rank's process, passes its events on, and says how it ended.

The function runs in a process of its own. So the exit code or signal and the last words are known, an interrupt reaches
a main thread without Ray's handlers, and the end of the process takes along all that it started. Nothing here imports
torch: an agent does, from which the process starts, while other actors are still being placed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ....events import Buffer, Event
from ....stream.emit import Emitter
from ....stream.listener import connect
from ....stream.readable import wait_readable
from ....stream.wire import FrameReader
from ...checks import addresses
from ...transfer.pickled import Pickled
from ...transfer.shared_memory import SharedPickle
from ..remote.rank_process import (
    ProcessStart,
    RankProcess,
    Work,
    find_version,
    name_machine,
    start_agent,
)
from ..remote.relay import Relay

_CONNECT_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 10.0
_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorInfo:
    """Where an actor is.

    Attributes:
        node: Ray's name of its node.
        address: the node's IP address.
        machine: alike in processes that see each other's process ids.
        port: where the actor listens for the store of the run, in case that it gets rank 0.
        version: this package's version there.
    """

    node: str
    address: str
    machine: str
    port: int
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What an actor has to do.

    Attributes:
        endpoint: host and port where the notebook listens.
        token: what a connection to the notebook begins with.
        work: of the rank that it gets.
    """

    endpoint: tuple[str, int]
    token: bytes
    work: Work


class RankActor:
    """Holds the process of one rank."""

    def __init__(self, start: ProcessStart) -> None:
        import ray

        self._start = start
        self._path = start.list_path(without=os.path.dirname(ray.__file__) + os.sep)
        self._address = ray.util.get_node_ip_address()
        self._listening = addresses.listen(self._address, 0)
        self._agent = start_agent(self._path, start.variables, with_ipython=start.with_ipython)

    def describe(self) -> ActorInfo:
        """Return where the actor is."""
        import ray

        return ActorInfo(
            node=ray.get_runtime_context().get_node_id(),
            address=self._address,
            machine=name_machine(),
            port=self._listening.getsockname()[1],
            version=find_version(),
        )

    def work(self, assignment: Assignment, parts: Sequence[Buffer]) -> str:
        """Run a rank to its end.

        Args:
            assignment: the rank, and where the notebook is.
            parts: the pickled function with its arguments, and the out-of-band buffers.

        Returns:
            Why the rank could not begin, empty where it ran.
        """
        rank = assignment.work.rank
        try:
            connection = connect(assignment.endpoint, assignment.token, rank, _CONNECT_SECONDS)
        except OSError as error:
            return error.strerror or str(error)
        with connection:
            payload = SharedPickle(Pickled(data=bytes(parts[0]), buffers=[*parts[1:]]))
            with self._listening, contextlib.closing(payload):
                process = RankProcess(
                    self._agent,
                    self._start,
                    assignment.work,
                    payload,
                    path=self._path,
                    store=self._listening,
                )
            relay = Relay(_SocketChannel(connection, rank))
            relay.add(rank, process)
            while relay.is_busy:
                relay.step()
            relay.close()
            _wait_for_notebook(connection)
        return ""


class _SocketChannel:
    """The connection of one rank to the notebook."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._orders = FrameReader()
        self._emitter = Emitter(connection, rank)

    def fileno(self) -> int:
        return self._connection.fileno()

    def now(self) -> float:
        return self._emitter.now()

    def send(self, events: Sequence[Event]) -> None:
        for event in events:
            self._emitter.emit(event)

    def receive(self) -> list[Event]:
        if not wait_readable(self._connection, 0):
            return []
        data = self._connection.recv(_BYTES)
        if not data:
            raise ConnectionResetError("the notebook has ended the connection")
        return self._orders.feed(data)


def _wait_for_notebook(connection: socket.socket) -> None:
    """Wait until the notebook has read everything: Ray may kill this process then, and bytes under way are lost."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_LAST_SECONDS)
        while connection.recv(_BYTES):
            pass
