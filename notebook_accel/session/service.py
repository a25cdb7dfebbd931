"""In a worker of a session: its main thread makes the session's calls, one after the other."""

from __future__ import annotations

import builtins
import contextlib
import dis
import os
import queue
import signal
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

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
    ReleaseOrder,
    Result,
    StackOrder,
)
from ..interrupts import interrupt_thread
from ..launch.transfer import cell_sources, failures
from ..launch.transfer.pickling import unpack
from ..launch.transfer.unpicklable import pack_value
from ..launch.worker.order_listener import OrderListener, report_stack
from ..launch.worker.stacks import StackWatch
from ..stopping import StopPoint
from ..stream import capture, displays
from ..stream.emit import Emitter
from ..takeover import finder
from . import cells, connections

MAIN: Final = "__main__"
_ARRIVED: Final = "_notebook_accel_arrived"  # no variable of a user has this name


class _MainModule(types.ModuleType):
    """`__main__` of a worker. Its variables are those of cells that ran here.

    Attributes:
        _notebook_accel_arrived: what came from the notebook, by its name and while it is used: for pickles.
    """

    __slots__ = (_ARRIVED,)

    def __init__(self) -> None:
        super().__init__(MAIN)
        self._notebook_accel_arrived: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def __getattr__(self, name: str) -> Any:
        found = self._notebook_accel_arrived.get(name) if name != _ARRIVED else None
        if found is not None:
            return found
        raise AttributeError(f"module {MAIN!r} has no attribute {name!r}")


class Service:
    """Makes calls in the thread that creates it; another thread receives the orders.

    Code of the session finds its variables in a module `__main__` of the worker's own, however the worker was started.

    Args:
        emitter: sends events to the notebook.
        output: of this worker.
        stop_point: where ranks agree to stop.
    """

    def __init__(self, emitter: Emitter, output: capture.Capture, stop_point: StopPoint) -> None:
        self._emitter = emitter
        self._output = output
        self._stop_point = stop_point
        self._orders: queue.SimpleQueue[CallOrder | LeaveOrder] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._stacks = StackWatch(self._main)
        self._current: int | None = None
        self._began_ns = 0
        self._interrupted = 0
        self._keeps_accelerate = False
        self._module = _MainModule()
        self._module.__dict__["__builtins__"] = builtins

    def obey(self, order: Order) -> None:
        """Carry out an order, in the thread that receives them.

        Args:
            order: for this rank.
        """
        if isinstance(order, (CallOrder, LeaveOrder)):
            self._orders.put(order)
        elif isinstance(order, InterruptOrder):
            self._interrupted = order.call
            if self._current == order.call:
                interrupt_thread(self._main)
        elif isinstance(order, ReleaseOrder):
            if self._current == order.call:
                connections.close_connections_to(order.pids, order.addresses)
                interrupt_thread(self._main)
        elif isinstance(order, StackOrder):
            if self._current == order.call:
                emitter = self._emitter
                emitter.emit(
                    report_stack(self._stacks, emitter.rank, emitter.now(), order.call, self._began_ns)
                )
        else:
            raise AssertionError(f"nobody obeys {order}")

    def work(self) -> None:
        """Make calls until the session ends."""
        __tracebackhide__ = True
        cells.ensure_display()
        emitter = self._emitter
        emitter.emit(Phase(rank=emitter.rank, time=emitter.now(), name="running"))
        signal.signal(signal.SIGINT, self._on_interrupt)
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
        try:
            self._began_ns = time.time_ns()
            self._current = order.call
            outcome = self._run_call(order)
            self._current = None
        except BaseException as error:
            self._current = None  # from here on interrupts are ignored
            outcome = failures.make_failure(emitter, _replace_exit(error, emitter.rank))
        self._current = None
        with contextlib.suppress(Exception):
            displays.flush_figures()
        self._output.push()
        current = runtime.current()
        emitter.emit(
            CallEnd(
                rank=emitter.rank,
                time=emitter.now(),
                call=order.call,
                outcome=outcome,
                positions=torch_dist.count_collectives(None if current is None else current.comm),
            )
        )

    def _run_call(self, order: CallOrder) -> Result:
        __tracebackhide__ = True
        cell_sources.install(order.sources)
        if order.as_accelerate:
            self._take_over()
        if self._interrupted >= order.call:
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, self._on_interrupt)  # the last call may have replaced it
        sys.modules[MAIN] = types.ModuleType(
            MAIN
        )  # classes of the notebook are not to be taken for the worker's
        try:
            function, args, kwargs, names = unpack(order.work, list(order.buffers))
        finally:
            sys.modules[MAIN] = self._module
        self._module._notebook_accel_arrived.update(names)
        with _share_globals(function, self._module.__dict__):
            value = function(*args, **kwargs)
        displays.flush_figures()
        pickled = pack_value(value if order.sends_value else None)
        emitter = self._emitter
        return Result(rank=emitter.rank, time=emitter.now(), value=pickled.data, buffers=pickled.buffers)

    def _take_over(self) -> None:
        """Do what a cell did in the notebook, maybe after the session had started; say once where it is too late."""
        if finder.is_installed() or self._keeps_accelerate:
            return
        try:
            finder.take_over_accelerate()
        except RuntimeError:
            self._keeps_accelerate = True
            place = getattr(sys.modules.get("accelerate"), "__file__", None)
            notices.tell(
                f"this worker had imported accelerate from {place} before take_over_accelerate() was called, and keeps "
                "it: `%session restart` or session.restart() starts workers that take over"
            )


def serve(events: socket.socket, emitter: Emitter, output: capture.Capture, stop_point: StopPoint) -> None:
    """Receive orders and make the calls among them, until the session ends.

    Args:
        events: the worker's event socket.
        emitter: sends events on it.
        output: of this worker.
        stop_point: where ranks agree to stop.
    """
    __tracebackhide__ = True
    service = Service(emitter, output, stop_point)
    OrderListener(events, emitter, stop_point, service.obey, output.write_out)
    service.work()


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
    try:
        yield
    finally:
        for name in _find_assigned(target.__code__):
            if name in scope:
                namespace[name] = scope[name]


def _find_assigned(code: types.CodeType) -> set[str]:
    """Return the globals that code, and the functions inside it, assign to."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _find_assigned(constant)
    return names


# -- functions that a session itself calls


def join() -> int:
    """Open the process group; return this process's id."""
    installed = detect.ensure()
    if isinstance(installed.comm, torch_dist.TorchComm):
        installed.comm.owned = False  # code that closes its group would close the session's
    _spare_gathers()
    return os.getpid()


def open_store() -> int:
    """Open a store for all ranks in this process; return its port."""
    from ..launch.engines.nodes import stores
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
    connections.close_connections_to(pids, addresses)
    detect.renew(port)
    _spare_gathers()


def _spare_gathers() -> None:
    """Let a gather of different shapes be an error in the cell, not the end of the session."""
    comm = detect.ensure().comm
    if isinstance(comm, torch_dist.TorchComm):
        comm.connect_soon()


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
