"""In a worker that stays: its main thread makes the calls of a session, one after the other."""

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
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .. import detect
from ..comm import torch_dist
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
    Where,
    WhereOrder,
)
from ..launch import failures, sources
from ..launch.culprit import pack_value
from ..launch.listener import Listener
from ..launch.ship import unpack
from ..launch.whereabouts import Whereabouts
from ..stopping import StopPoint
from ..stream import capture, displays
from ..stream.emit import Emitter
from . import cells, connections

MAIN: Final = "__main__"


class Service:
    """Makes calls in the thread that makes it; another thread hears the orders.

    Code of the session finds its variables in a module `__main__` of the worker's own, however it was started.
    """

    def __init__(self, emitter: Emitter, output: capture.Capture, stop_point: StopPoint) -> None:
        self._emitter = emitter
        self._output = output
        self._stop_point = stop_point
        self._orders: queue.SimpleQueue[CallOrder | LeaveOrder] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._whereabouts = Whereabouts(self._main)
        self._current: int | None = None
        self._interrupted = 0
        self._module = types.ModuleType(MAIN)
        self._module.__dict__["__builtins__"] = builtins

    def obey(self, order: Order) -> None:
        """Take an order, in the thread that hears them."""
        if isinstance(order, (CallOrder, LeaveOrder)):
            self._orders.put(order)
        elif isinstance(order, InterruptOrder):
            self._interrupted = order.call
            if self._current == order.call:
                _interrupt(self._main)
        elif isinstance(order, ReleaseOrder):
            if self._current == order.call:
                connections.close_to(order.pids)
                _interrupt(self._main)
        elif isinstance(order, WhereOrder):
            if self._current == order.call:
                self._emitter.emit(self._where(order.call))
        else:
            raise AssertionError(f"nobody obeys {order}")

    def _where(self, call: int) -> Where:
        emitter = self._emitter
        seen = self._whereabouts.look()
        return Where(
            rank=emitter.rank,
            time=emitter.now(),
            call=call,
            collective=seen.collective,
            seconds=seen.seconds,
            frames=seen.frames,
        )

    def work(self) -> None:
        """Make calls until the session ends."""
        __tracebackhide__ = True
        cells.ensure_display()
        emitter = self._emitter
        emitter.emit(Phase(rank=emitter.rank, time=emitter.now(), name="running"))
        signal.signal(signal.SIGINT, self._on_interrupt)
        while isinstance(order := self._orders.get(), CallOrder):
            self._answer(order)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._current is not None:
            raise KeyboardInterrupt

    def _answer(self, order: CallOrder) -> None:
        __tracebackhide__ = True
        emitter = self._emitter
        self._stop_point.reset()
        outcome: Result | Failure
        try:
            self._current = order.call
            outcome = self._made(order)
            self._current = None
        except BaseException as error:
            self._current = None  # from here on an interrupt comes too late
            outcome = failures.failure_of(emitter, _told(error, emitter.rank))
        self._current = None
        with contextlib.suppress(Exception):
            displays.flush_figures()
        self._output.push()
        emitter.emit(
            CallEnd(
                rank=emitter.rank,
                time=emitter.now(),
                call=order.call,
                outcome=outcome,
                positions=torch_dist.positions(),
            )
        )

    def _made(self, order: CallOrder) -> Result:
        __tracebackhide__ = True
        sources.install(order.sources)
        if self._interrupted >= order.call:
            raise KeyboardInterrupt
        signal.signal(signal.SIGINT, self._on_interrupt)  # the last call may have put its own there
        sys.modules[MAIN] = types.ModuleType(
            MAIN
        )  # classes of the notebook are not to be taken for the worker's
        try:
            function, args, kwargs = unpack(order.work, list(order.buffers))
        finally:
            sys.modules[MAIN] = self._module
        with _sharing_globals(function, self._module.__dict__):
            value = function(*args, **kwargs)
        displays.flush_figures()
        parcel = pack_value(value if order.sends_value else None)
        emitter = self._emitter
        return Result(rank=emitter.rank, time=emitter.now(), value=parcel.pickled, buffers=parcel.buffers)


def serve(events: socket.socket, emitter: Emitter, output: capture.Capture, stop_point: StopPoint) -> None:
    """Hear the orders that come on `events` and make the calls among them, until the session ends."""
    __tracebackhide__ = True
    service = Service(emitter, output, stop_point)
    Listener(events, emitter, stop_point, service.obey)
    service.work()


def _told(error: BaseException, rank: int) -> BaseException:
    """Return what the notebook is to raise: an exit would end the notebook's own process."""
    if not isinstance(error, SystemExit):
        return error
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    text = f"rank {rank} called exit({error.code!r}): a worker of a session stays, return from the function instead"
    return WorkerExitedError(text, rank=rank, pid=os.getpid(), exitcode=code).with_traceback(
        error.__traceback__
    )


def _interrupt(thread: int) -> None:
    if sys.platform == "win32":
        import _thread

        _thread.interrupt_main()
    else:
        signal.pthread_kill(thread, signal.SIGINT)


@contextlib.contextmanager
def _sharing_globals(function: Any, namespace: dict[str, Any]) -> Iterator[None]:
    """Let a function of the notebook find, beside its own globals, the worker's; what it assigns to stays there."""
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
        for name in _assigned(target.__code__):
            if name in scope:
                namespace[name] = scope[name]


def _assigned(code: types.CodeType) -> set[str]:
    """Return the globals that code, and the functions inside it, assign to."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _assigned(constant)
    return names


# -- what a session calls besides the user's functions


def join() -> int:
    """Open the process group; return this process's id."""
    installed = detect.ensure()
    if isinstance(installed.comm, torch_dist.TorchComm):
        installed.comm.owned = False  # code that closes its group would close the session's
    return os.getpid()


def renew(port: int, pids: list[int]) -> None:
    """Make the process group anew, at another port; what is left of the old one ends."""
    connections.close_to(pids)
    detect.renew(port)


def push(values: Mapping[str, Any]) -> None:
    """Make variables."""
    cells.variables().update(values)


def pull(name: str) -> Any:
    """Return a variable; NameError where there is none of that name."""
    namespace = cells.variables()
    if name not in namespace:
        known = sorted(key for key in namespace if not key.startswith("_"))
        there = ", ".join(known[:20]) or "none"
        raise NameError(f"there is no variable {name!r} on this worker; there are: {there}", name=name)
    return namespace[name]
