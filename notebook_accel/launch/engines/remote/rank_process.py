"""The process of a rank on another machine: what it is told, how an agent there starts it, and what it does first.

Only the process itself imports torch: who starts it does without.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psutil

from .... import environ, probes
from ....takeover import finder
from ....trust import secret
from ... import signals
from ...agent.client import Agent, spawn
from ...agent.modules import Modules
from ...agent.orders import ImportOrder, Limits, WorkerOrder
from ...checks import addresses
from ...transfer.shared_memory import SharedPickle

if TYPE_CHECKING:  # with torch
    from ...transfer.settings import Settings
    from ...worker.main import WorkerEnds

THREADS: Final = "OMP_NUM_THREADS"


@dataclass(frozen=True, kw_only=True, slots=True)
class Notes:
    """What the notebook tells all ranks; who starts a process passes it on unread, because reading it needs torch.

    Attributes:
        settings: the notebook's.
        sources: lines of the notebook's cells, by the file name under which they were compiled.
        child_start_method: how the worker's own children start; None for the default.
        in_background: whether the notebook runs cells meanwhile.
        serve: what the worker does instead of calling a function once, see `worker.main.WorkerSpec`; None for nothing.
    """

    settings: Settings
    sources: Mapping[str, list[str]]
    child_start_method: str | None
    in_background: bool
    serve: Callable[..., None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStart:
    """How the process of every rank starts.

    Attributes:
        variables: environment variables.
        directory: the notebook's working folder, used on machines that have it.
        path: folders where the notebook finds modules, used on machines that have them.
        with_ipython: whether to import IPython where it is installed, because the notebook has.
    """

    variables: Mapping[str, str]
    directory: str
    path: Sequence[str]
    with_ipython: bool

    def choose_directory(self) -> str:
        """Return the working folder of processes on this machine."""
        return self.directory if os.path.isdir(self.directory) else os.getcwd()

    def list_path(self, own: Sequence[str]) -> list[str]:
        """Return the folders where processes on this machine find modules.

        Args:
            own: those of this machine; the notebook's follow.
        """
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWorker:
    """What the process of a rank does; see `agent.worker.Work`.

    Attributes:
        work: of the rank.
        environment: all its variables.
        directory: its working folder.
        with_ipython: whether to import IPython.
        memory: how the payload lies in the last descriptors, see `SharedPickle.layout`.
    """

    work: Work
    environment: Mapping[str, str]
    directory: str
    with_ipython: bool
    memory: Any

    def run(self, ends: WorkerEnds, fds: Sequence[int]) -> NoReturn:
        """Run the rank; rank 0 holds the store of the run, and its first descriptor listens for that."""
        from torch.distributed import TCPStore

        from ...leftovers import make_sockets_folder
        from ...worker.main import WorkerSpec, main

        make_sockets_folder()
        notes: Notes = pickle.loads(self.work.notes)
        is_first = self.work.rank == 0
        store: Any = None
        if is_first:
            listening = socket.socket(fileno=fds[0])
            port = listening.getsockname()[1]
            with _without_errors():  # torch complains of a machine whose address has no name
                store = TCPStore(
                    self.work.address,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listening.detach(),
                )
        threads = self.environment.get(THREADS, "").partition(",")[0].strip()
        spec = WorkerSpec(
            rank=self.work.rank,
            environment=self.environment,
            serve=notes.serve,
            sends_value=self.work.sends_value,
            forked=False,
            with_ipython=self.with_ipython,
            threads=(int(threads) or None) if threads.isdecimal() else None,
            child_start_method=notes.child_start_method,
            in_background=notes.in_background,
            has_all_nodes=True,
            directory=self.directory,
            settings=notes.settings,
            sources=notes.sources,
            leaves_last=store is not None,
        )
        main(spec, ends, SharedPickle.from_filenos(self.memory, fds[is_first:]))


@contextlib.contextmanager
def _without_errors() -> Iterator[None]:
    """Keep what C code writes to this process's errors from the cell."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def start_agent(path: Sequence[str], variables: Mapping[str, str], *, with_ipython: bool) -> Agent:
    """Return a new agent of this machine, which imports torch while the notebook does something else.

    Args:
        path: the folders where it finds modules.
        variables: environment variables, besides this process's.
        with_ipython: whether it imports IPython too.

    Raises:
        OSError: the system gives no process or descriptor.
    """
    variables = finder.complete_variables({**read_own_variables(), **variables})
    agent = spawn(path=path, variables=variables, with_ipython=with_ipython)
    agent.import_ahead(ImportOrder(modules=Modules(versions={}), environment=variables, path=path))
    return agent


class RankProcess:
    """The process of a rank, and our ends of its socket and pipes.

    Args:
        agent: starts it.
        start: how.
        work: what its rank has to do.
        payload: the pickled function with its arguments.
        path: the folders where it finds modules.
        store: a socket that listens for the store of the run; only rank 0 gets it.
        fallbacks: more environment variables, for what nobody has chosen.

    Raises:
        OSError: the agent has ended, or the system has no memory or descriptor.

    Attributes:
        worker: the process, as the agent tells of it.
        events, stdout, stderr: our ends.
    """

    def __init__(
        self,
        agent: Agent,
        start: ProcessStart,
        work: Work,
        payload: SharedPickle,
        *,
        path: Sequence[str],
        store: socket.socket,
        fallbacks: Mapping[str, str] | None = None,
    ) -> None:
        self._is_given_up = False
        environment = make_environment(start, work, fallbacks or {})
        rank_worker = RankWorker(
            work=work,
            environment=environment,
            directory=start.choose_directory(),
            with_ipython=start.with_ipython and probes.is_available("IPython"),
            memory=payload.layout,
        )
        self.events, their_events = socket.socketpair()
        self.stdout, their_stdout = Pipe(duplex=False)
        self.stderr, their_stderr = Pipe(duplex=False)
        fds = [their_events.fileno(), their_stdout.fileno(), their_stderr.fileno()]
        fds += [*([] if work.rank else [store.fileno()]), *payload.filenos()]
        order = WorkerOrder(
            rank=work.rank,
            environment=environment,
            directory=rank_worker.directory,
            limits=Limits.capture(),
            imports=ImportOrder(modules=Modules(versions={}), environment=environment, path=path),
            work=pickle.dumps(rank_worker),
            num_fds=len(fds) + 2,
        )
        with their_events, their_stdout, their_stderr:
            self.worker = agent.start_worker(order, fds)

    @property
    def exitcode(self) -> int | None:
        """How it ended, negative for a signal; None before."""
        is_lost = self.worker.has_ended and self.worker.exitcode is None
        return -signal.SIGKILL if is_lost or self._is_given_up else self.worker.exitcode

    def send(self, signum: int) -> None:
        """Send a signal to the process; one that has not started yet counts as killed, and never begins."""
        if not self.worker.pid:
            self._is_given_up = True
        elif not self.worker.has_ended:
            signals.send(self.worker.pid, signum)


def make_environment(start: ProcessStart, work: Work, fallbacks: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of a rank's process.

    Args:
        start: how the process starts.
        work: what its rank has to do.
        fallbacks: for what nobody has chosen.
    """
    interface = addresses.find_loopback_interface() if work.is_alone else find_interface(work.address)
    gloo = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    variables = {**gloo, **fallbacks, **read_own_variables(), **start.variables, **work.variables}
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
