"""The actor of one rank under Ray: it starts the rank's process, passes on what that says, and tells how it ended.

The function runs in a process of its own below the actor's: then its exit code or signal and its last words are known,
an interrupt reaches a main thread without Ray's handlers, and its end takes everything with it that it started.
Nothing here imports torch, so that it is imported once for each rank; the process begins with that while the actors
are still being joined.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final

import psutil

from .... import environ, probes
from ....events import BeginOrder, Buffer, Ended, Event, Order, SignalOrder
from ....stream.door import knock
from ....stream.emit import Emitter
from ....stream.inbox import Inbox
from ....stream.wire import GO, FrameReader
from ... import addresses, signals
from ...parcel import Parcel
from ...segment import Segment
from .child import Ends, Handover

_KNOCK_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_BYTES: Final = 1 << 16
_START: Final = (
    "import sys; sys.path[:] = {path!r}; from {module} import main; main({events}, {with_ipython})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where an actor is.

    Attributes:
        node: Ray's name of its node.
        address: of the node.
        machine: the same for processes that see each other by process id.
        port: where it listens for the store of the run, should it become rank 0's.
        version: of this package there.
    """

    node: str
    address: str
    machine: str
    port: int
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outset:
    """What every rank's process finds as it starts.

    Attributes:
        variables: that it has from the first on, so that libraries see them when they are imported.
        directory: the notebook's, for nodes that have it.
        path: likewise, where the notebook finds modules.
        with_ipython: whether it imports IPython, as the notebook has.
    """

    variables: Mapping[str, str]
    directory: str
    path: Sequence[str]
    with_ipython: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What an actor has to do: the rank, and the notebook's address and token.

    `variables` are set in the process besides those of its outset; `alone` says that all ranks are on one node.
    """

    rank: int
    endpoint: tuple[str, int]
    token: bytes
    variables: Mapping[str, str]
    alone: bool
    sends_value: bool
    notes: bytes


def machine() -> str:
    """Return what tells machines apart, and containers, whose processes have numbers of their own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def version() -> str:
    """Return the version of this package here, empty where it runs from a folder."""
    return probes.version("notebook-accel") or ""


class RankActor:
    """Holds the process of one rank."""

    def __init__(self, outset: Outset) -> None:
        import ray

        self._address = ray.util.get_node_ip_address()
        self._listening = addresses.listen(self._address, 0)
        self._process = _Process(outset, self._listening)

    def where(self) -> Place:
        """Say where it is."""
        import ray

        return Place(
            node=ray.get_runtime_context().get_node_id(),
            address=self._address,
            machine=machine(),
            port=self._listening.getsockname()[1],
            version=version(),
        )

    def work(self, assignment: Assignment, parts: Sequence[Buffer]) -> str:
        """Run the rank to its end; return why it could not begin, empty where it did."""
        self._listening.close()
        try:
            connection = knock(assignment.endpoint, assignment.token, assignment.rank, _KNOCK_SECONDS)
        except OSError as error:
            return error.strerror or str(error)
        with connection:
            parcel = Parcel(pickled=bytes(parts[0]), buffers=[*parts[1:]])
            self._process.begin(assignment, self._address, parcel)
            _Relay(assignment.rank, self._process, connection).run()
        return ""


class _Process:
    """The process of a rank, and our ends of what joins us with it.

    Args:
        outset: what it finds.
        store: listens for the store of the run, should this become rank 0's.
    """

    def __init__(self, outset: Outset, store: socket.socket) -> None:
        self._outset = outset
        self.events, their_events = socket.socketpair()
        self.stdout, their_stdout = Pipe(duplex=False)
        self.stderr, their_stderr = Pipe(duplex=False)
        their_lifeline, self._lifeline = Pipe(duplex=False)
        given: list[Any] = [their_events, their_stdout, their_stderr, their_lifeline]
        self._ends = Ends(
            events=their_events.fileno(),
            stdout=their_stdout.fileno(),
            stderr=their_stderr.fileno(),
            lifeline=their_lifeline.fileno(),
            store=store.fileno(),
        )
        try:
            self.popen = _started(outset, self._ends)
        finally:
            for end in given:
                end.close()

    def begin(self, assignment: Assignment, address: str, parcel: Parcel) -> None:
        """Tell the process its rank and the function; it waits for the notebook's word to call that."""
        payload = Segment(parcel)
        handover = Handover(
            rank=assignment.rank,
            environment=_environment(self._outset, assignment, address),
            ends=self._ends,
            places=payload.places,
            address=address,
            sends_value=assignment.sends_value,
            directory=_directory(self._outset),
            notes=assignment.notes,
        )
        stdin = self.popen.stdin
        assert stdin is not None
        if sys.platform == "win32":
            raise NotImplementedError  # RayEngine refuses it
        try:
            with contextlib.suppress(BrokenPipeError):  # how it ended is told in any case
                socket.send_fds(self.events, [b"x"], [payload.fileno()])
                with stdin:
                    pickle.dump(handover, stdin)
        finally:
            payload.close()

    def send(self, signum: int) -> None:
        """Send a signal to it; SIGKILL goes to all that it started."""
        pid = self.popen.pid
        if signum == signals.KILL:
            signals.kill_groups([pid], signals.descendants([pid]))
        elif self.popen.poll() is None:
            signals.send(pid, signum)

    def close(self) -> None:
        """Give back what it held; it must have ended."""
        signals.kill_group(self.popen.pid)  # what it started would outlive it
        self._lifeline.close()


def _started(outset: Outset, ends: Ends) -> subprocess.Popen[bytes]:
    path = _path(outset.path, _directory(outset))
    code = _START.format(
        path=path, module=Handover.__module__, events=ends.events, with_ipython=outset.with_ipython
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**environ.snapshot(), **outset.variables},
        cwd=_directory(outset),
        stdin=subprocess.PIPE,
        stdout=ends.stdout,
        stderr=ends.stderr,
        pass_fds=[ends.events, ends.stdout, ends.stderr, ends.lifeline, ends.store],
        start_new_session=True,
    )


def _directory(outset: Outset) -> str:
    return outset.directory if os.path.isdir(outset.directory) else os.getcwd()


def _environment(outset: Outset, assignment: Assignment, address: str) -> dict[str, str]:
    interface = addresses.loopback_interface() if assignment.alone else _interface(address)
    fallbacks = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {**fallbacks, **environ.snapshot(), **outset.variables, **assignment.variables}


def _interface(address: str) -> str | None:
    """Return the network interface with this address: a node's own name need not stand for it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def _path(notebooks: Sequence[str], directory: str) -> list[str]:
    """Return where the process finds modules: where this one does, then where the notebook does."""
    import ray

    rays = os.path.dirname(ray.__file__)
    own = [place for place in sys.path if not os.path.abspath(place).startswith(rays + os.sep)]
    more = [place or directory for place in notebooks]
    return [*own, *dict.fromkeys(place for place in more if place not in own and os.path.exists(place))]


class _Relay:
    """Passes events of a process on to the notebook, and orders of the notebook to the process."""

    def __init__(self, rank: int, process: _Process, connection: socket.socket) -> None:
        self._rank = rank
        self._process = process
        self._connection = connection
        self._orders = FrameReader()
        self._emitter = Emitter(connection, rank)
        self._inbox = Inbox()
        self._is_deserted = False
        self._ended, self._at_end = os.pipe()
        self._inbox.add(rank, {"events": process.events, "stdout": process.stdout, "stderr": process.stderr})
        self._inbox.watch(self._ended)
        self._inbox.watch(connection.fileno())

    def run(self) -> None:
        """Do it until the process has ended and the notebook knows."""
        popen = self._process.popen
        waiting = threading.Thread(target=self._wait, daemon=True)
        waiting.start()
        while popen.returncode is None:
            self._forward(self._inbox.poll(_LOOK_SECONDS))
            self._listen()
        waiting.join()
        self._forward(self._inbox.finish(self._rank))
        self._process.close()
        now = self._emitter.now()
        self._forward([Ended(rank=self._rank, time=now, pid=popen.pid, exitcode=popen.returncode)])
        self._inbox.close()
        os.close(self._ended)
        os.close(self._at_end)
        self._say_goodbye()

    def _wait(self) -> None:
        self._process.popen.wait()
        os.write(self._at_end, b"x")

    def _forward(self, events: Sequence[Event]) -> None:
        try:
            for event in events:
                self._emitter.emit(event)
        except OSError:
            self._desert()

    def _listen(self) -> None:
        """Hear what the notebook says; where it has left, the process ends."""
        if self._is_deserted or not select.select([self._connection], [], [], 0)[0]:
            return
        try:
            data = self._connection.recv(_BYTES)
        except OSError:
            data = b""
        if not data:
            self._desert()
        for order in self._orders.feed(data):
            self._obey(order)

    def _desert(self) -> None:
        if not self._is_deserted:
            self._is_deserted = True
            self._inbox.unwatch(self._connection.fileno())
            self._process.send(signals.KILL)

    def _obey(self, order: Event) -> None:
        if isinstance(order, BeginOrder):
            self._inbox.tell_all(GO)
        elif isinstance(order, SignalOrder):
            self._process.send(order.signum)
        else:
            assert isinstance(order, Order), f"{order} is no order"
            self._inbox.tell(order)

    def _say_goodbye(self) -> None:
        """Let the notebook read all before this process may be killed, which would take back what is under way."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(_LAST_SECONDS)
            while self._connection.recv(_BYTES):
                pass
