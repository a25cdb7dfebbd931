"""On a host: joins the notebook with the processes of a run's ranks, as long as its connection lives.

Frames come and go by a `Channel`: standard input and output, or a connection of a Ray actor. This process imports no
torch; one of its own does, `launch.agent`, which starts those of ranks. It ends with all that it has started when the
channel ends, and where it is started by a program also when it hears nothing for some seconds, or has had nothing to do
for some minutes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import psutil

from .... import devices, environ
from ....errors import LaunchError
from ....events import Event
from ....stream.listener import connect
from ....stream.readable import wait_readable
from ....stream.wire import FrameReader
from ....takeover import finder
from ...agent.client import Agent
from ...agent.modules import Modules
from ...agent.orders import ImportOrder, Limits, WorkerOrder
from ...agent.worker import Program
from ...checks import addresses
from ...leftovers import LONGEST_SECONDS
from ...transfer.pickled import Pickled
from ...transfer.shared_memory import SharedPickle
from .channel import Channel
from .messages import (
    Assigned,
    AssignOrder,
    Cleared,
    ClearOrder,
    Devices,
    Driven,
    DriveOrder,
    EndOrder,
    Joined,
    JoinOrder,
    Located,
    LocateOrder,
    Prepared,
    PrepareOrder,
    Reached,
    ReachOrder,
    Watched,
    WatchOrder,
)
from .rank_process import THREADS, RankProcess, find_interface, name_machine, read_own_variables, start_agent
from .reaching import Reach, drop_connections
from .relay import Relay, wrap_buffers
from .run_sender import RunSender, find_run

_LAST_SECONDS: Final = LONGEST_SECONDS + 1.0
_FIRST_SECONDS: Final = 60.0  # that an agent waits at least for its first run
_LOOK_SECONDS: Final = 0.5
_FILE_SECONDS: Final = 0.1  # between two looks at the files of a run that is watched
_JOIN_SECONDS: Final = 3.0
_ANSWER_BYTES: Final = 1 << 16
_DRIVER: Final = "notebook_accel.launch.engines.remote.driver"
_ACCELERATORS: Final = (
    "/dev/nvidia[0-9]*",
    "/dev/kfd",
    "/dev/davinci[0-9]*",
    "/dev/dri/renderD*",
    "/dev/accel/accel*",
)
_COUNT: Final = (
    "from notebook_accel import devices as d; k = d.best(); print(k.label, 0 if k is d.CPU else k.counter())"
)


def describe() -> dict[str, Any]:
    """Return what the notebook has to know of this host, for JSON."""
    words = (environ.get("SSH_CONNECTION") or "").split()
    reached = words[2].partition("%")[0] if len(words) == 4 else ""
    if launcher := environ.get("SLURM_LAUNCH_NODE_IPADDR"):  # SSH_CONNECTION may be that of a login node
        reached = addresses.find_own_address(launcher).partition("%")[0]
    own = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return {
        "address": reached,
        "addresses": [address for address in own if not addresses.is_loopback(address)],
        "machine": name_machine(),
        "has_devices": any(map(glob.glob, _ACCELERATORS)),
    }


def locate(peers: Sequence[str]) -> Located:
    """Return the address by which other hosts reach this one: the one from which the system sends to them.

    Args:
        peers: addresses of the others, the likeliest first.
    """
    found = (addresses.find_own_address(peer).partition("%")[0] for peer in peers)
    address = next((each for each in found if each and not addresses.is_loopback(each)), "")
    problem = "" if address else _explain_isolation(peers)
    return Located(rank=-1, time=time.time(), address=address, problem=problem)


def _explain_isolation(peers: Sequence[str]) -> str:
    others = ", ".join(peers) or "which have no address of their own"
    return (
        "it is reached by a loopback address, and it has no route to the other hosts "
        f"({others}): name it by an address that they reach"
    )


def main(out: int, with_ipython: bool, variable: str, warm_seconds: float, lock: str) -> int:
    """Serve the notebook until it is gone; return the exit code.

    Args:
        out: descriptor that frames are written to.
        with_ipython: whether processes import IPython, where it is installed.
        variable: environment variable that is set to true for all processes; empty for none.
        warm_seconds: how long the agent, and the libraries that it holds for the next launch, stay without a run.
        lock: path of a file to lock as long as the agent is there; empty for none.
    """
    if lock:
        fcntl.flock(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), fcntl.LOCK_SH)
    if variable:
        environ.put({variable: "true"})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the end of input says it
    if environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        with contextlib.suppress(OSError):
            os.setsid()  # where SLURM kills a group of processes, this one is left to end what ranks have started
    server = HostServer(Channel(0, out), sys.path, with_ipython, warm_seconds)
    if describe()["has_devices"]:
        server.count_devices()
    signal.signal(signal.SIGTERM, lambda signum, frame: server.leave())
    server.run()
    return 0


class HostServer:
    """Starts the processes of ranks, and relays between them and the notebook.

    Args:
        channel: the way to the notebook.
        path: the folders where processes find modules, besides the notebook's.
        with_ipython: whether processes import IPython.
        warm_seconds: how long to stay without a run; each run says it anew.
        agent: starts the processes; None makes one.
        payload: the function with its arguments, where orders do not bring them; None where they do.
    """

    def __init__(
        self,
        channel: Channel,
        path: Sequence[str],
        with_ipython: bool,
        warm_seconds: float,
        *,
        agent: Agent | None = None,
        payload: SharedPickle | None = None,
    ) -> None:
        self._warm_seconds = warm_seconds
        self._is_leaving = self._has_run = False
        self._channel = channel
        self._relay = Relay(channel, self._obey)
        self._path, self._with_ipython = path, with_ipython
        self._agent = agent or start_agent(path, {}, with_ipython=with_ipython)
        self._payload = payload
        self._assigned: dict[int, RankProcess] = {}
        self._listening: socket.socket | None = None
        self._reach: Reach | None = None
        self._is_clearing = False
        self._idle_since = time.monotonic()
        self._counting: subprocess.Popen[str] | None = None
        self._sender: RunSender | None = None

    def run(self) -> None:
        """Serve until the notebook is gone or has no use for this host any more."""
        try:
            while not (self._relay.has_lost_notebook or self._is_superfluous()):
                self._relay.step(_LOOK_SECONDS if self._sender is None else _FILE_SECONDS)
                self._answer()
                if self._sender is not None:
                    self._send(*map(wrap_buffers, self._sender.read(_FILE_SECONDS)))
                with contextlib.suppress(OSError):
                    self._channel.keep_alive()
        finally:
            self._end()

    def leave(self) -> None:
        """End what runs, and then `run`; a signal handler may call it."""
        self._is_leaving = True
        self._relay.wake()

    def _is_superfluous(self) -> bool:
        if self._is_leaving:
            return True
        if self._relay.is_busy or self._assigned or self._listening is not None or self._sender is not None:
            self._idle_since = time.monotonic()
        seconds = self._warm_seconds if self._has_run else max(self._warm_seconds, _FIRST_SECONDS)
        return time.monotonic() - self._idle_since > seconds

    def _end(self) -> None:
        if self._is_leaving:  # somebody else ends this process, and the notebook still listens
            self._relay.pass_on_rest()
        self._relay.has_lost_notebook = True
        self._relay.kill()
        deadline = time.monotonic() + _LAST_SECONDS
        while self._relay.is_busy and time.monotonic() < deadline:
            self._relay.wake()
            self._relay.step()
        self._agent.end()
        if self._counting is not None:
            self._counting.kill()
        self._relay.close()

    def _send(self, *events: Event) -> None:
        with contextlib.suppress(OSError):  # the next step notes it
            self._channel.send(events)

    def _obey(self, order: Event) -> None:
        self._idle_since = time.monotonic()  # whoever asks is about to launch
        if isinstance(order, LocateOrder):
            self._send(locate(order.peers))
        elif isinstance(order, PrepareOrder):
            self._prepare(order)
        elif isinstance(order, ReachOrder):
            self._reach = Reach(order.places, self._relay.wake)
        elif isinstance(order, AssignOrder):
            self._assign(order)
        elif isinstance(order, ClearOrder):
            self._is_clearing = True
            self._stop_listening()
            self._relay.kill()
        elif isinstance(order, DriveOrder):
            self._start_driver(order)
        elif isinstance(order, JoinOrder):
            self._join(order)
        elif isinstance(order, WatchOrder):
            self._watch(order)
        elif isinstance(order, EndOrder):
            assert self._sender is not None
            with contextlib.suppress(OSError):  # a full disk
                self._sender.folder.ask_to_stop(order.grace)
        else:
            raise AssertionError(f"nobody obeys {order}")

    def _prepare(self, order: PrepareOrder) -> None:
        self._stop_listening()
        if self._agent.has_ended:
            self._agent.end()
            self._agent = start_agent(self._path, {}, with_ipython=self._with_ipython)
        try:
            self._listening = addresses.listen_for_nodes(order.address, order.port)
            answer = Prepared(rank=-1, time=time.time(), port=self._listening.getsockname()[1])
        except OSError as error:
            why = f"it cannot listen at {order.address}:{order.port} ({error.strerror or error})"
            answer = Prepared(rank=-1, time=time.time(), problem=why)
        self._send(answer)

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def _assign(self, order: AssignOrder) -> None:
        """Start the processes; `_answer` says so once they are there."""
        self._has_run, self._warm_seconds = True, order.warm_seconds
        listening = self._listening
        assert listening is not None  # since a PrepareOrder
        drop_connections(listening)
        path, threads = order.start.list_path(self._path), devices.share_of_cores(len(order.works))
        try:
            with contextlib.ExitStack() as stack:
                payload = self._payload
                if payload is None:
                    pickled = Pickled(data=bytes(order.data), buffers=[*order.buffers])
                    payload = stack.enter_context(contextlib.closing(SharedPickle(pickled)))
                for work in order.works:
                    fallbacks = {THREADS: str(threads)}
                    if not work.is_alone and (interface := find_interface(work.address)):
                        fallbacks["NCCL_SOCKET_IFNAME"] = interface
                    process = RankProcess(
                        self._agent,
                        order.start,
                        work,
                        payload,
                        path=path,
                        store=listening,
                        fallbacks=fallbacks,
                    )
                    self._assigned[work.rank] = process
                    self._relay.add(work.rank, process)
        except (OSError, LaunchError) as error:
            self._assigned.clear()
            self._send(Assigned(rank=-1, time=time.time(), pids={}, problem=str(error)))
        self._stop_listening()

    def _answer(self) -> None:
        """Say what has become of the last orders, where that is known now."""
        workers = {rank: process.worker for rank, process in self._assigned.items()}
        if workers and all(worker.pid or worker.has_ended for worker in workers.values()):
            self._assigned = {}
            pids = {rank: worker.pid for rank, worker in workers.items()}
            problem = next((worker.problem for worker in workers.values() if worker.problem), "")
            self._send(Assigned(rank=-1, time=time.time(), pids=pids, problem=problem))
        if self._reach is not None and self._reach.problem is not None:
            self._send(Reached(rank=-1, time=time.time(), problem=self._reach.problem))
            self._reach = None
        if self._is_clearing and not self._relay.is_busy and not self._assigned:
            self._is_clearing = False
            self._send(Cleared(rank=-1, time=time.time()))

    # -- runs that outlive the notebook

    def _start_driver(self, order: DriveOrder) -> None:
        """Start the process; its answer is passed on."""
        ours, theirs = socket.socketpair()
        variables = finder.complete_variables(read_own_variables())
        work = SharedPickle(Pickled(data=bytes(order.work), buffers=[]))
        with theirs, contextlib.closing(work), open(os.devnull, "r+b") as nowhere:
            fds = [theirs.fileno(), nowhere.fileno(), nowhere.fileno(), theirs.fileno(), *work.filenos()]
            worker_order = WorkerOrder(
                rank=0,
                environment=variables,
                directory=os.sep,
                limits=Limits.capture(),
                imports=ImportOrder(modules=Modules(versions={}), environment=variables, path=self._path),
                work=pickle.dumps(Program(module=_DRIVER, arguments=[work.layout])),
                num_fds=len(fds) + 2,
                outlives=True,
            )
            worker = self._agent.start_worker(worker_order, fds)
        reader, answers = FrameReader(), list[Event]()

        def look() -> None:
            if not wait_readable(ours.fileno(), 0.0):
                return
            data = ours.recv(_ANSWER_BYTES)
            answers.extend(reader.feed(data))
            if not data:
                self._relay.unwatch(ours.fileno())
                ours.close()
                worker.close()
                problem = "the process of the run has ended at its start"
                self._send(*answers or [Driven(rank=-1, time=time.time(), problem=problem)])

        self._relay.watch(ours.fileno(), look)

    def _join(self, order: JoinOrder) -> None:
        """Serve the process that drives a run from now on."""
        problem = ""
        for address in order.addresses:
            try:
                connection = connect((address, order.port), order.token, order.number, _JOIN_SECONDS)
                break
            except OSError as error:
                problem = f"it cannot connect to {address}:{order.port} ({error.strerror or error})"
                self._channel.keep_alive()
        else:
            self._send(Joined(rank=-1, time=time.time(), problem=problem))
            return
        self._send(Joined(rank=-1, time=time.time()))
        fd = connection.detach()
        self._channel = self._relay.replace_channel(Channel(fd, fd, expects_news=False))

    def _watch(self, order: WatchOrder) -> None:
        """Send the events of a run from now on."""
        folder = find_run(order.run)
        if folder is None:
            problem = f"no run {order.run} is known there" if order.run else "no run is known there"
            self._send(Watched(rank=-1, time=time.time(), problem=problem))
        else:
            self._sender = RunSender(folder)
            self._send(self._sender.describe())

    # -- devices

    def count_devices(self) -> None:
        """Let another process count the devices: this one does without torch."""
        self._counting = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {_COUNT}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._counting.stdout is not None
        self._relay.watch(self._counting.stdout.fileno(), self._look_at_count)

    def _look_at_count(self) -> None:
        counting = self._counting
        assert counting is not None and counting.stdout is not None
        if counting.poll() is None:
            return
        self._relay.unwatch(counting.stdout.fileno())
        with counting.stdout:
            words = counting.stdout.read().split()
        self._counting = None
        number = int(words[-1]) if words and words[-1].isdecimal() else 0
        label = " ".join(words[:-1]) if number else ""
        self._send(Devices(rank=-1, time=time.time(), label=label, count=number))
