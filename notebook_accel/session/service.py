"""In a worker of a session: its main thread makes the session's calls, one after the other."""

from __future__ import annotations

import builtins
import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import psutil

from .. import detect, notices, runtime
from ..comm import torch_dist
from ..environ import get
from ..errors import WorkerExitedError
from ..events import (
    CallEnd,
    CallOrder,
    Failure,
    InterruptOrder,
    LeaveOrder,
    Order,
    Phase,
    Result,
)
from ..launch.transfer import cell_sources, failures
from ..launch.transfer.pickling import unpack
from ..launch.transfer.unpicklable import pack_value
from ..launch.worker.order_listener import OrderListener
from ..stopping import StopPoint
from ..stream import capture, displays
from ..stream.emit import Emitter
from ..takeover import finder
from . import cells

MAIN: Final = "__main__"


class Service:
    """Makes calls in the thread that creates it; another thread receives the orders.

    Code of the session finds its variables in a module `__main__` of the worker's own, however the worker was started.

    Args:
        events: the worker's event socket.
        emitter: sends events on it.
        output: of this worker.
        stop_point: where ranks agree to stop.
    """

    def __init__(
        self, events: socket.socket, emitter: Emitter, output: capture.Capture, stop_point: StopPoint
    ) -> None:
        self._emitter = emitter
        self._output = output
        self._stop_point = stop_point
        self._orders: queue.SimpleQueue[CallOrder | LeaveOrder] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._current: int | None = None
        self._interrupted = 0
        self._arrived: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._module = types.ModuleType(MAIN)  # its variables are those of cells that ran here
        vars(self._module).update(__builtins__=builtins, __getattr__=self._find_arrived)
        self._listener = OrderListener(events, emitter, stop_point, self._obey, output.write_out)

    def _obey(self, order: Order) -> None:
        """Carry out an order, in the thread that receives them."""
        if isinstance(order, (CallOrder, LeaveOrder)):
            self._orders.put(order)
        else:
            assert isinstance(order, InterruptOrder), f"nobody obeys {order}"
            self._interrupted = order.call
            if self._current == order.call:
                if order.pids:
                    close_connections_to(order.pids, order.addresses)
                signal.pthread_kill(self._main, signal.SIGINT)

    def _find_arrived(self, name: str) -> Any:
        """Return what came from the notebook and is in use: pickles look for it by its name."""
        found = self._arrived.get(name)
        if found is None:
            raise AttributeError(f"module {MAIN!r} has no attribute {name!r}")
        return found

    def work(self) -> None:
        """Make calls until the session ends."""
        __tracebackhide__ = True
        emitter = self._emitter
        emitter.emit(Phase(rank=emitter.rank, time=emitter.now(), name="running"))
        while isinstance(order := self._orders.get(), CallOrder):
            self._make_call(order)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._current is not None:
            raise KeyboardInterrupt

    def _make_call(self, order: CallOrder) -> None:
        __tracebackhide__ = True
        emitter = self._emitter
        self._stop_point.reset()
        self._output.restore()
        outcome: Result | Failure
        before = _count_collectives() or {}
        try:
            self._listener.began_ns = time.time_ns()
            self._current = order.call
            outcome = self._run_call(order)
            self._current = None
        except BaseException as error:
            self._current = None  # from here on interrupts are ignored
            outcome = failures.make_failure(emitter, _replace_exit(error, emitter.rank))
        with contextlib.suppress(Exception):
            displays.flush_figures()
        self._output.push()
        begun = _count_collectives()
        if begun is not None:
            begun = {name: count - before.get(name, 0) for name, count in begun.items()}
            begun = {name: count for name, count in begun.items() if count}
        emitter.emit(
            CallEnd(
                rank=emitter.rank, time=emitter.now(), call=order.call, outcome=outcome, collectives=begun
            )
        )

    def _run_call(self, order: CallOrder) -> Result:
        __tracebackhide__ = True
        cell_sources.install(order.sources)
        if order.as_accelerate and not finder.is_installed():  # asked for since the worker started
            try:
                finder.take_over_accelerate()
            except RuntimeError:
                notices.tell(
                    "this worker had imported accelerate before take_over_accelerate() was called, and keeps it: "
                    "`%session restart` or session.restart() starts workers that take over"
                )
        if self._interrupted >= order.call:
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, self._on_interrupt)  # which the last call may have replaced
        # the notebook's classes are not to be taken for the worker's
        sys.modules[MAIN] = types.ModuleType(MAIN)
        try:
            function, args, kwargs, names = unpack(order.work, list(order.buffers))
        finally:
            sys.modules[MAIN] = self._module
        self._arrived.update(names)
        with _share_globals(function, vars(self._module)):
            value = function(*args, **kwargs)
        displays.flush_figures()
        pickled = pack_value(value if order.sends_value else None)
        emitter = self._emitter
        return Result(rank=emitter.rank, time=emitter.now(), value=pickled.data, buffers=pickled.buffers)


def serve(events: socket.socket, emitter: Emitter, output: capture.Capture, stop_point: StopPoint) -> None:
    """Receive orders and make the calls among them, until the session ends; the arguments are those of `Service`."""
    __tracebackhide__ = True
    Service(events, emitter, output, stop_point).work()


def _count_collectives() -> dict[str, int] | None:
    """Return how many collectives each process group has begun; None where this rank has left its group."""
    current = runtime.current()
    return torch_dist.count_collectives(None if current is None else current.comm)


def _replace_exit(error: BaseException, rank: int) -> BaseException:
    """Return the error that the notebook raises: an exit would end the notebook's own process."""
    if not issubclass(type(error), SystemExit):  # `isinstance` asks the error too, which may raise
        return error
    assert isinstance(error, SystemExit)
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    text = f"rank {rank} called exit({error.code!r}): a worker of a session stays, return from the function instead"
    return WorkerExitedError(text, rank=rank, pid=os.getpid(), exitcode=code).with_traceback(
        error.__traceback__
    )


@contextlib.contextmanager
def _share_globals(function: Any, namespace: dict[str, Any]) -> Iterator[None]:
    """Let a function of the notebook find the worker's variables too; globals that it assigns become such variables."""
    target: Any = function
    while hasattr(target, "func"):
        target = target.func
    target = getattr(target, "__func__", target)
    if not isinstance(target, types.FunctionType) or target.__module__ != MAIN:
        yield
        return
    scope = target.__globals__
    for name, value in namespace.items():
        scope.setdefault(name, value)
    before = dict(scope)
    try:
        yield
    finally:
        namespace |= {name: value for name, value in scope.items() if before.get(name, before) is not value}


# -- functions that a session itself calls


def join() -> None:
    """Open the process group."""
    comm = detect.ensure().comm
    if isinstance(comm, torch_dist.TorchComm):
        comm.owned = False  # code that closes its group would close the session's
        comm.connect_soon()  # a gather of different shapes is an error in the cell, not the end of the session


def open_store() -> int:
    """Open a store for all ranks in this process; return its port."""
    from ..launch.engines import stores
    from ..launch.job import Rendezvous

    current = detect.ensure()
    current.store = stores.open_store(Rendezvous(address=get("MASTER_ADDR") or "127.0.0.1"))
    return int(current.store.port)


def renew(port: int, pids: list[int], addresses: Sequence[str]) -> None:
    """Replace the process group by a new one; what is left of the old one ends.

    Args:
        port: where the ranks meet.
        pids: process ids of all ranks.
        addresses: of the machines that they are on; empty where they are all on one.
    """
    close_connections_to(pids, addresses, port)  # other ranks may have connected to the new store already
    detect.renew(port)
    join()


def close_connections_to(
    pids: Collection[int], addresses: Collection[str] = (), new_port: int | None = None
) -> None:
    """Shut this process's connections to others, and abort its groups of other backends than gloo.

    This ends the wait of a thread for other ranks, which no signal ends. Aborting gloo's groups (torch 2.13) does not:
    but once its connection is shut a collective raises, here and on the rank at the other end.

    Args:
        pids: process ids of the others.
        addresses: of their machines, where they are on several: then all connections to these are shut, but those to
            the store where the ranks meet.
        new_port: of the store where they will meet next; None where there is none.
    """
    torch_dist.abort_groups()
    current = runtime.current()
    if current is not None and isinstance(current.comm, torch_dist.TorchComm):
        current.comm.shut_down_sockets()
    theirs = {(found.laddr.port, found.raddr.port) for pid in pids for found in _list_connections(pid)}
    stores = {get("MASTER_PORT"), str(new_port)}
    for found in _list_connections(os.getpid()):
        here, there = found.laddr.port, found.raddr.port
        is_to_rank = len(addresses) > 1 and found.raddr.ip.removeprefix("::ffff:") in addresses
        is_to_rank = is_to_rank and stores.isdisjoint((str(here), str(there)))
        if found.fd >= 0 and (is_to_rank or (there, here) in theirs):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _list_connections(pid: int) -> list[Any]:
    """Return the TCP connections of a process; none where it has ended."""
    try:
        process = psutil.Process(pid)
        found = process.net_connections if hasattr(process, "net_connections") else process.connections
        return [connection for connection in found("tcp") if connection.raddr]
    except (psutil.Error, OSError):
        return []


def push(values: Mapping[str, Any]) -> None:
    """Set variables of this worker.

    Args:
        values: by name.
    """
    cells.variables().update(values)


def pull(name: str) -> Any:
    """Return a variable of this worker.

    Args:
        name: its name.

    Raises:
        NameError: there is no variable of that name.
    """
    namespace = cells.variables()
    if name not in namespace:
        known = sorted(key for key in namespace if not key.startswith("_"))
        there = ", ".join(known[:20]) or "none"
        raise NameError(f"there is no variable {name!r} on this worker; there are: {there}", name=name)
    return namespace[name]
