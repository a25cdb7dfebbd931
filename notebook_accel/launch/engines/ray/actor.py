"""The actor of one rank under Ray: it starts the rank's process, passes its events on, and says how it ended.

The function runs in a process below the actor's own. So the exit code or signal and the last words are known, an
interrupt reaches a main thread without Ray's handlers, and the end of the process takes along all that it started.
Nothing here imports torch: then each rank imports it once. The process begins with that import at once, while other
actors are still being placed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
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
from ..remote.process import Descriptors
from ..remote.rank_process import (
    ProcessStart,
    RankProcess,
    Work,
    find_version,
    make_handover,
    name_machine,
    start_process,
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
        rank: the rank that it gets.
        endpoint: host and port where the notebook listens.
        token: what a connection to the notebook begins with.
        variables: environment variables, besides those of the process's start.
        is_alone: whether all ranks are on one node.
        sends_value: whether the notebook wants the value that the function returns.
        notes: a pickled `Notes`, for the process.
    """

    rank: int
    endpoint: tuple[str, int]
    token: bytes
    variables: Mapping[str, str]
    is_alone: bool
    sends_value: bool
    notes: bytes


class RankActor:
    """Holds the process of one rank."""

    def __init__(self, start: ProcessStart) -> None:
        import ray

        self._start = start
        self._path = start.list_path(without=os.path.dirname(ray.__file__) + os.sep)
        self._address = ray.util.get_node_ip_address()
        self._listening = addresses.listen(self._address, 0)
        self._process = RankProcess(self._start_process, self._listening)

    def _start_process(self, descriptors: Descriptors) -> subprocess.Popen[bytes]:
        self._popen = start_process(self._start, descriptors, self._path)
        return self._popen

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
        self._listening.close()
        try:
            connection = connect(assignment.endpoint, assignment.token, assignment.rank, _CONNECT_SECONDS)
        except OSError as error:
            return error.strerror or str(error)
        with connection:
            self._begin(assignment, Pickled(data=bytes(parts[0]), buffers=[*parts[1:]]))
            relay = Relay(_SocketChannel(connection, assignment.rank))
            relay.add(assignment.rank, self._process)
            waiting = threading.Thread(target=self._wait, args=(relay,), daemon=True)
            waiting.start()
            while relay.is_busy:
                relay.step()
            waiting.join()
            relay.close()
            _wait_for_notebook(connection)
        return ""

    def _begin(self, assignment: Assignment, pickled: Pickled) -> None:
        """Hand the rank and the function to the process; it calls the function at the notebook's word."""
        payload = SharedPickle(pickled, in_one_file=True)
        work = Work(
            rank=assignment.rank,
            variables=assignment.variables,
            is_alone=assignment.is_alone,
            address=self._address,
            sends_value=assignment.sends_value,
            notes=assignment.notes,
        )
        stdin = self._popen.stdin
        assert stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and the relay says how
                self._process.give_payload(payload)
                with stdin:
                    stdin.write(make_handover(self._start, work, payload, self._path))
        finally:
            payload.close()

    def _wait(self, relay: Relay) -> None:
        self._popen.wait()
        relay.wake()


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
