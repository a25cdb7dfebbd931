"""The process of a rank, as whoever holds it on the rank's machine sees it. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from .... import environ, probes
from ....takeover import finder
from ....trust import secret
from ... import signals
from ...checks import addresses
from ...leftovers import Leftovers
from ...transfer.shared_memory import SharedPickle
from .process import Descriptors, Handover

_START: Final = (
    "import sys; sys.path[:] = {path!r}; from {module} import Descriptors, main; "
    "main(Descriptors(**{descriptors!r}), {with_ipython})"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStart:
    """How the process of every rank starts, before it has a rank.

    Attributes:
        variables: environment variables; libraries see them when they are imported.
        directory: the notebook's working folder, used on machines that have it.
        path: folders where the notebook finds modules, used on machines that have them.
        with_ipython: whether to import IPython, because the notebook has.
    """

    variables: Mapping[str, str]
    directory: str
    path: Sequence[str]
    with_ipython: bool

    def choose_directory(self) -> str:
        """Return the working folder of processes on this machine."""
        return self.directory if os.path.isdir(self.directory) else os.getcwd()

    def list_path(self, *, without: str | None = None) -> list[str]:
        """Return the folders where processes on this machine find modules: this process's, then the notebook's.

        Args:
            without: folder whose parts are left out of this process's.
        """
        own = [
            place for place in sys.path if without is None or not os.path.abspath(place).startswith(without)
        ]
        more = [place or self.choose_directory() for place in self.path]
        return [
            *own,
            *dict.fromkeys(place for place in more if place not in own and os.path.exists(place)),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a rank has to do.

    Attributes:
        rank: the rank.
        variables: environment variables, besides those of the process's start.
        is_alone: whether all ranks are on one machine.
        address: the address by which other ranks reach this machine.
        sends_value: whether the notebook wants the value that the function returns.
        notes: a pickled `Notes`, for the process.
    """

    rank: int
    variables: Mapping[str, str]
    is_alone: bool
    address: str
    sends_value: bool
    notes: bytes


class Running(Protocol):
    """A process that was started; `subprocess.Popen` is one.

    Attributes:
        pid: its process id, 0 while it is not known.
        returncode: its exit code, negative for a signal; None while it runs.
    """

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...


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


class RankProcess:
    """The process of a rank, and our ends of its sockets and pipes.

    Args:
        start: starts the process with its descriptors; the rest of them are closed here afterwards.
        store: a socket that listens for the store of the run, for the process that gets rank 0; None for others.

    Attributes:
        running: the process.
        events, stdout, stderr: our ends.
    """

    def __init__(self, start: Callable[[Descriptors], Running], store: socket.socket | None) -> None:
        self._signal = 0
        self.events, their_events = socket.socketpair()
        self.stdout, their_stdout = Pipe(duplex=False)
        self.stderr, their_stderr = Pipe(duplex=False)
        their_lifeline, self._lifeline = Pipe(duplex=False)
        given: list[Any] = [their_events, their_stdout, their_stderr, their_lifeline]
        try:
            self.running = start(
                Descriptors(
                    events=their_events.fileno(),
                    stdout=their_stdout.fileno(),
                    stderr=their_stderr.fileno(),
                    lifeline=their_lifeline.fileno(),
                    store=-1 if store is None else store.fileno(),
                )
            )
        except BaseException:
            self.close()
            for ours in (self.events, self.stdout, self.stderr):
                ours.close()
            raise
        finally:
            for end in given:
                end.close()

    def give_payload(self, payload: SharedPickle) -> None:
        """Hand the function and its arguments to the process; OSError where it has ended."""
        if sys.platform == "win32":
            raise NotImplementedError  # the engines refuse it
        socket.send_fds(self.events, [b"x"], [payload.fileno()])

    def send(self, signum: int) -> None:
        """Send a signal to the process; what it started is ended after it."""
        running = self.running
        if running.returncode is not None:
            return
        if not running.pid:
            self._signal = signals.KILL if self._signal == signals.KILL else signum
            return
        signals.send(running.pid, signum)

    def send_waiting(self) -> None:
        """Send the signal that came before the process was there, if one did."""
        if self._signal and self.running.pid:
            signum, self._signal = self._signal, 0
            self.send(signum)

    def end_leftovers(self, leftovers: Leftovers) -> None:
        """Ask what the process has left running to end; never waits.

        Args:
            leftovers: sees to it that they do.
        """
        if self.running.pid:
            leftovers.end(self.running.pid)

    def close(self) -> None:
        """Let go of the process: what is left of it ends."""
        self._lifeline.close()


def start_process(
    start: ProcessStart, descriptors: Descriptors, path: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a process that imports what ranks need and waits for its `Handover` on standard input.

    Args:
        start: how.
        descriptors: its ends.
        path: the folders where it finds modules.
    """
    given = {name: fd for name, fd in dataclasses.asdict(descriptors).items() if fd >= 0}
    code = _START.format(
        path=list(path),
        module=Handover.__module__,
        descriptors=dataclasses.asdict(descriptors),
        with_ipython=start.with_ipython,
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=finder.complete_variables({**read_own_variables(), **start.variables}),
        cwd=start.choose_directory(),
        stdin=subprocess.PIPE,
        stdout=descriptors.stdout,
        stderr=descriptors.stderr,
        pass_fds=tuple(given.values()),
        start_new_session=True,
    )


def make_handover(
    start: ProcessStart,
    work: Work,
    payload: SharedPickle,
    path: Sequence[str],
    *,
    threads: int | None = None,
    with_ipython: bool | None = None,
    fallbacks: Mapping[str, str] | None = None,
) -> bytes:
    """Return a pickled `Handover`.

    Args:
        start: how the process has started.
        work: what its rank has to do.
        payload: the pickled function with its arguments.
        path: the folders where it finds modules.
        threads: threads of torch's CPU kernels, where OMP_NUM_THREADS comes too late for them; else None.
        with_ipython: whether to import IPython; None is what `start` says.
        fallbacks: more environment variables, for what nobody has chosen.
    """
    handover = Handover(
        rank=work.rank,
        environment=_make_environment(start, work, fallbacks or {}),
        spans=payload.spans,
        address=work.address,
        sends_value=work.sends_value,
        directory=start.choose_directory(),
        path=path,
        with_ipython=start.with_ipython if with_ipython is None else with_ipython,
        notes=work.notes,
        threads=threads,
    )
    return pickle.dumps(handover)


def _make_environment(start: ProcessStart, work: Work, more: Mapping[str, str]) -> dict[str, str]:
    interface = addresses.find_loopback_interface() if work.is_alone else find_interface(work.address)
    fallbacks = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    variables = {**fallbacks, **more, **read_own_variables(), **start.variables, **work.variables}
    return finder.complete_variables(variables)


def read_own_variables() -> dict[str, str]:
    """Return this process's variables for a worker, which needs no proof."""
    return {name: text for name, text in environ.snapshot().items() if name != secret.VARIABLE}


def find_interface(address: str) -> str | None:
    """Return the network interface with this address; the machine's host name may belong to another one."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return str(name)
    return None
