"""The actor of one rank under Ray: it starts the rank's process, passes its events on, and says how it ended.

The function runs in a process below the actor's own. So the exit code or signal and the last words are known, an
interrupt reaches a main thread without Ray's handlers, and the end of the process takes along all that it started.
Nothing here imports torch: then each rank imports it once. The process begins with that import at once, while other
actors are still being placed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
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
from ....stream.emit import Emitter
from ....stream.inbox import Inbox
from ....stream.listener import connect
from ....stream.readable import wait_readable
from ....stream.wire import GO, FrameError, FrameReader, describe_loss
from ....takeover import finder
from ....trust import secret
from ... import signals
from ...checks import addresses
from ...leftovers import Leftovers
from ...transfer.pickled import Pickled
from ...transfer.shared_memory import SharedPickle
from .process import Descriptors, Handover

_CONNECT_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 1.0
_BYTES: Final = 1 << 16
_START: Final = (
    "import sys; sys.path[:] = {path!r}; from {module} import main; main({events}, {with_ipython})"
)


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
class ProcessStart:
    """How the process of every rank starts, before it has a rank.

    Attributes:
        variables: environment variables; libraries see them when they are imported.
        directory: the notebook's working folder, used on nodes that have it.
        path: folders where the notebook finds modules, used on nodes that have them.
        with_ipython: whether to import IPython, because the notebook has.
    """

    variables: Mapping[str, str]
    directory: str
    path: Sequence[str]
    with_ipython: bool


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


def name_machine() -> str:
    """Return a name that differs between machines, and between containers with process ids of their own."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def find_version() -> str:
    """Return the version of this package here, empty where it runs from a folder."""
    return probes.version("notebook-accel") or ""


class RankActor:
    """Holds the process of one rank."""

    def __init__(self, start: ProcessStart) -> None:
        import ray

        self._address = ray.util.get_node_ip_address()
        self._listening = addresses.listen(self._address, 0)
        self._process = _Process(start, self._listening)

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
            pickled = Pickled(data=bytes(parts[0]), buffers=[*parts[1:]])
            self._process.begin(assignment, self._address, pickled)
            _Relay(assignment.rank, self._process, connection).run()
        return ""


class _Process:
    """The process of a rank, and our ends of its sockets and pipes.

    Args:
        start: how it starts.
        store: a socket that listens for the store of the run, in case that this becomes rank 0.
    """

    def __init__(self, start: ProcessStart, store: socket.socket) -> None:
        self._start = start
        self._leftovers = Leftovers()
        self.events, their_events = socket.socketpair()
        self.stdout, their_stdout = Pipe(duplex=False)
        self.stderr, their_stderr = Pipe(duplex=False)
        their_lifeline, self._lifeline = Pipe(duplex=False)
        given: list[Any] = [their_events, their_stdout, their_stderr, their_lifeline]
        self._descriptors = Descriptors(
            events=their_events.fileno(),
            stdout=their_stdout.fileno(),
            stderr=their_stderr.fileno(),
            lifeline=their_lifeline.fileno(),
            store=store.fileno(),
        )
        try:
            self.popen = _start_process(start, self._descriptors)
        finally:
            for end in given:
                end.close()

    def begin(self, assignment: Assignment, address: str, pickled: Pickled) -> None:
        """Hand the rank and the function to the process; it calls the function at the notebook's word."""
        payload = SharedPickle(pickled)
        handover = Handover(
            rank=assignment.rank,
            environment=_make_environment(self._start, assignment, address),
            descriptors=self._descriptors,
            spans=payload.spans,
            address=address,
            sends_value=assignment.sends_value,
            directory=_choose_directory(self._start),
            notes=assignment.notes,
        )
        stdin = self.popen.stdin
        assert stdin is not None
        if sys.platform == "win32":
            raise NotImplementedError  # RayEngine refuses it
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and `_Relay` says how
                socket.send_fds(self.events, [b"x"], [payload.fileno()])
                with stdin:
                    pickle.dump(handover, stdin)
        finally:
            payload.close()

    def send(self, signum: int) -> None:
        """Send a signal to the process; what it started is ended after it."""
        if self.popen.poll() is None:
            signals.send(self.popen.pid, signum)

    def close(self) -> None:
        """End what the process left, and give back what it held; it must have ended, and `end_leftovers` was called."""
        self._leftovers.finish()
        self._lifeline.close()

    def end_leftovers(self) -> None:
        """Ask what the process has left running to end; never waits."""
        self._leftovers.end(self.popen.pid)


def _start_process(start: ProcessStart, descriptors: Descriptors) -> subprocess.Popen[bytes]:
    path = _list_path(start.path, _choose_directory(start))
    code = _START.format(
        path=path, module=Handover.__module__, events=descriptors.events, with_ipython=start.with_ipython
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=finder.complete_variables({**_read_own(), **start.variables}),
        cwd=_choose_directory(start),
        stdin=subprocess.PIPE,
        stdout=descriptors.stdout,
        stderr=descriptors.stderr,
        pass_fds=dataclasses.astuple(descriptors),
        start_new_session=True,
    )


def _choose_directory(start: ProcessStart) -> str:
    return start.directory if os.path.isdir(start.directory) else os.getcwd()


def _make_environment(start: ProcessStart, assignment: Assignment, address: str) -> dict[str, str]:
    interface = addresses.find_loopback_interface() if assignment.is_alone else _find_interface(address)
    fallbacks = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    variables = {**fallbacks, **_read_own(), **start.variables, **assignment.variables}
    return finder.complete_variables(variables)


def _read_own() -> dict[str, str]:
    """Return this process's variables for a worker, which needs no proof."""
    return {name: text for name, text in environ.snapshot().items() if name != secret.VARIABLE}


def _find_interface(address: str) -> str | None:
    """Return the network interface with this address; the node's host name may belong to another one."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def _list_path(of_notebook: Sequence[str], directory: str) -> list[str]:
    """Return the folders where the process finds modules: this process's, then the notebook's."""
    import ray

    rays = os.path.dirname(ray.__file__)
    own = [place for place in sys.path if not os.path.abspath(place).startswith(rays + os.sep)]
    more = [place or directory for place in of_notebook]
    return [*own, *dict.fromkeys(place for place in more if place not in own and os.path.exists(place))]


class _Relay:
    """Passes a process's events on to the notebook, and the notebook's orders to the process."""

    def __init__(self, rank: int, process: _Process, connection: socket.socket) -> None:
        self._rank = rank
        self._process = process
        self._connection = connection
        self._orders = FrameReader()
        self._emitter = Emitter(connection, rank)
        self._inbox = Inbox()
        self._has_lost_notebook = False
        self._ended_fd, self._signal_fd = os.pipe()
        self._inbox.add(rank, {"events": process.events, "stdout": process.stdout, "stderr": process.stderr})
        self._inbox.watch(self._ended_fd)
        self._inbox.watch(connection.fileno())

    def run(self) -> None:
        """Pass on until the process has ended and the notebook knows it."""
        popen = self._process.popen
        waiting = threading.Thread(target=self._wait, daemon=True)
        waiting.start()
        while popen.returncode is None:
            self._forward(self._inbox.poll(_LOOK_SECONDS))
            self._listen()
        waiting.join()
        self._process.end_leftovers()  # it would write for ever
        self._forward(self._inbox.finish(self._rank))
        now = self._emitter.now()
        self._forward([Ended(rank=self._rank, time=now, pid=popen.pid, exitcode=popen.returncode)])
        self._process.close()
        self._inbox.close()
        os.close(self._ended_fd)
        os.close(self._signal_fd)
        self._wait_for_notebook()

    def _wait(self) -> None:
        self._process.popen.wait()
        os.write(self._signal_fd, b"x")

    def _forward(self, events: Sequence[Event]) -> None:
        try:
            for event in events:
                self._emitter.emit(event)
        except OSError:
            self._lose_notebook()

    def _listen(self) -> None:
        """Obey what the notebook says; where the notebook has left, kill the process."""
        if self._has_lost_notebook or not wait_readable(self._connection, 0):
            return
        try:
            data = self._connection.recv(_BYTES)
            orders = self._orders.feed(data)
        except FrameError as error:
            self._forward([describe_loss(self._rank, error, "the notebook")])
            data, orders = b"", []
        except OSError:
            data, orders = b"", []
        if not data:
            self._lose_notebook()
        for order in orders:
            self._obey(order)

    def _lose_notebook(self) -> None:
        if not self._has_lost_notebook:
            self._has_lost_notebook = True
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

    def _wait_for_notebook(self) -> None:
        """Wait until the notebook has read everything: Ray may kill this process then, and bytes under way are lost."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(_LAST_SECONDS)
            while self._connection.recv(_BYTES):
                pass
