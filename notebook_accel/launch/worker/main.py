"""The worker process: from its first act to its last."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ... import environ, runtime, topology
from ...comm.torch_dist import wait_for_leaving_ranks
from ...events import LeaveOrder, Order, Phase, Result
from ...stopping import StopPoint
from ...stream import capture, displays
from ...stream.emit import Emitter
from ...stream.wire import GO, PipeEnd
from ...takeover import finder
from .. import children, descriptors
from ..signals import STACK_SIGNAL
from ..transfer import cell_sources, failures
from ..transfer.random_states import RandomStates
from ..transfer.shared_memory import SharedPickle
from ..transfer.unpicklable import pack_value
from . import lifeline, spawned_children
from .metrics_reporter import WorkerReporter
from .order_listener import OrderListener

_OBEY_SECONDS = 10.0  # that daemons have to end when they are asked to


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker of a run: what the notebook, or whoever starts the process, hands to it.

    Attributes:
        rank: global rank.
        environment: all environment variables of the process.
        stdout: the pipe that its output goes to; None sends output as events.
        stderr: likewise for its errors.
        events: the socket for events to the notebook and orders from it. The first word on it says to begin.
        lifeline: a pipe that closes when the notebook ends; the worker is killed then.
        payload: the tuple of function and arguments, or the `SharedPickle` that holds it; None where `serve` is given.
        sends_value: whether the notebook wants the value that the function returns.
        forked: whether the process is a fork of the notebook's.
        with_ipython: whether to import IPython, because the notebook has.
        threads: threads of torch's CPU kernels; None leaves torch's own choice.
        child_start_method: how processes of the worker's own start, data loader workers for example; None leaves the
            default of `multiprocessing`.
        in_background: whether the notebook runs cells meanwhile: then an interrupt is not meant for this worker.
        directory: the working folder; None keeps that of the process.
        random_states: the notebook's, set before the function is called.
        sources: lines of the notebook's cells, by the file name under which they were compiled.
        serve: what the worker does instead of calling a function once: it serves calls until it is told to leave.
        has_all_nodes: whether the launcher that starts the process has the ranks of all nodes.
        leaves_last: whether the process holds the store where all ranks meet: then it waits until the others have left.
        setup: called before the function, when all workers are started.
    """

    rank: int
    environment: Mapping[str, str]
    stdout: PipeEnd | None
    stderr: PipeEnd | None
    events: socket.socket
    lifeline: PipeEnd
    payload: Any
    sends_value: bool
    forked: bool
    with_ipython: bool
    threads: int | None
    child_start_method: str | None
    in_background: bool
    directory: str | None
    random_states: RandomStates
    sources: Mapping[str, list[str]]
    serve: Callable[[socket.socket, Emitter, capture.Capture, StopPoint], None] | None = None
    has_all_nodes: bool = False
    leaves_last: bool = False
    setup: Callable[[], None] | None = None


def main(spec: WorkerSpec) -> NoReturn:
    """Run the spec's function, and end the process; never returns to the caller.

    Args:
        spec: what to run, and how.
    """
    __tracebackhide__ = True
    emitter = Emitter(spec.events, spec.rank)
    output = capture.Capture(spec.stdout, spec.stderr, emitter)
    code = 1
    try:
        _become_worker(spec)
        code = _work(spec, emitter, output)
    except KeyboardInterrupt:
        pass
    finally:
        _leave(code, output)


def _become_worker(spec: WorkerSpec) -> None:
    """Give the process its own session, signals and environment, and drop what is the kernel's."""
    if sys.platform != "win32" and os.getsid(0) != os.getpid():
        os.setsid()
    if sys.platform == "win32":
        threading.Thread(target=_wait_for_end, args=(spec.lifeline,), daemon=True).start()
    else:
        lifeline.follow(spec.lifeline.fileno())
    if spec.forked:
        _forget_kernel()
    descriptors.leave_server()
    _forget_finalizers()
    for signum in (signal.SIGTERM, *_list_terminal_signals()):
        signal.signal(signum, signal.SIG_DFL)
    if spec.in_background:
        # Before `setsid` above, an interrupt of another cell reached this process too, as part of the kernel's process
        # group. It is blocked and pending. To ignore the signal, even for a moment, discards what is pending.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable(2)
    if sys.platform != "win32" and STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, 2, all_threads=False)
    environ.restore(spec.environment)
    if not spec.forked and spec.directory is not None:
        os.chdir(spec.directory)
    if spec.child_start_method is not None:
        children.set_default(spec.child_start_method)
    spawned_children.hand_down()
    capture.unused_stdin()


def _work(spec: WorkerSpec, emitter: Emitter, output: capture.Capture) -> int:
    """Call the function, and send what it returns or raises; return the exit code."""
    __tracebackhide__ = True
    code, others_left = 0, threading.Event()
    try:
        _prepare_for_function(spec, output)
        stop_point = StopPoint()
        place = topology.from_environ()
        reporter = WorkerReporter(emitter, output.flush, stop_point, place, has_all_nodes=spec.has_all_nodes)
        runtime.set_reporter(reporter)
        if spec.events.recv(len(GO)) != GO:
            return 1  # the notebook has given up
        if spec.serve is not None:
            spec.serve(spec.events, emitter, output, stop_point)
            _leave_group()
            return 0
        listener = OrderListener(
            spec.events,
            emitter,
            stop_point,
            functools.partial(_note_leave, others_left),
            write_out=output.write_out,
        )
        if spec.setup is not None:
            spec.setup()
        function, args = _open(spec.payload)
        emitter.emit(Phase(rank=spec.rank, time=emitter.now(), name="running", pid=os.getpid()))
        try:
            value = function(*args)
        finally:
            listener.send_pulse()  # how far it came
        _finish(spec, emitter, value)
    except SystemExit as error:
        code = _handle_exit(error, spec, emitter)
    except BaseException as error:
        failures.report(emitter, error)
        return 1
    if spec.leaves_last and code == 0:
        others_left.wait()
    return code


def _open(payload: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return function and arguments; a fresh process finds what came with them in `__main__` by their names."""
    if not isinstance(payload, SharedPickle):
        function, args = payload
        return function, args
    function, args, names = payload.open()
    vars(sys.modules["__main__"]).update(names)
    return function, args


def _note_leave(others_left: threading.Event, order: Order) -> None:
    assert isinstance(order, LeaveOrder), f"nobody obeys {order}"
    others_left.set()


def _prepare_for_function(spec: WorkerSpec, output: capture.Capture) -> None:
    """Set up what the function expects to find: displays, bars, threads, random states, lines of cells."""
    if environ.flag(finder.VARIABLE):
        finder.install()
    if spec.with_ipython:
        import IPython.core.interactiveshell  # noqa: F401
    output.install()
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    cell_sources.install(spec.sources)
    spec.random_states.restore(forked=spec.forked)


def _finish(spec: WorkerSpec, emitter: Emitter, value: Any) -> None:
    """Send the function's value, and leave the process group."""
    __tracebackhide__ = True
    displays.flush_figures()
    pickled = pack_value(value if spec.sends_value else None)
    emitter.emit(Result(rank=spec.rank, time=emitter.now(), value=pickled.data, buffers=pickled.buffers))
    _leave_group()


def _leave_group() -> None:
    """Leave the process group when all ranks are done with it: one that leaves early resets its peers' connections.

    A group of gloo stays open: it holds no device, its threads need 20 ms to end, and they end with the process anyway.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    wait_for_leaving_ranks()
    with contextlib.suppress(Exception):
        if torch.distributed.get_backend() != "gloo":
            torch.distributed.destroy_process_group()


def _handle_exit(error: SystemExit, spec: WorkerSpec, emitter: Emitter) -> int:
    """Return the exit code that `sys.exit` asked for; a plain exit counts as returning None."""
    code = 0 if error.code is None else error.code
    if not isinstance(code, int):  # a message, or any object
        print(code, file=sys.stderr)
        return 1
    if code == 0:
        _finish(spec, emitter, None)
    return code & 0xFF


def _leave(code: int, output: capture.Capture) -> NoReturn:
    """End the process: its own exit handlers run, the kernel's do not."""
    try:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        children = lifeline.list_children()
        threading.Thread(target=_kill_deaf_daemons, daemon=True).start()
        with contextlib.suppress(Exception):
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # waits for its processes; a fork has no exit handler for it
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        output.close()
        lifeline.end_children(children)
    finally:
        os._exit(code)


def _kill_deaf_daemons() -> None:
    """Kill, after a while, daemons that multiprocessing asks to end at exit: it waits for a deaf one for ever."""
    while True:
        time.sleep(_OBEY_SECONDS)
        for child in list(multiprocessing.process._children):  # type: ignore[attr-defined]
            if child.daemon:
                with contextlib.suppress(OSError, ValueError):
                    child.kill()


def _forget_kernel() -> None:
    """Drop what a fork copied from the kernel and only the kernel may use."""
    signal.set_wakeup_fd(-1)
    atexit._clear()
    descriptors.leave_kernel_ports()
    runtime.forget()
    gc.freeze()


def _forget_finalizers() -> None:
    """Keep finalizers (`weakref.finalize`) that exist already from running at exit; the function's own do run.

    In a fork they are the kernel's, and would remove its temporary directories, for example. In a fresh process they
    are torch's: they take its operators apart one by one, longer than everything else at the end.
    """
    if getattr(weakref.finalize, "_registered_with_atexit", False):  # else there is none
        atexit.unregister(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
        atexit.register(_finalize, next(weakref.finalize._index_iter))  # type: ignore[attr-defined]


def _finalize(first: int) -> None:
    """Run the finalizers of this process's own.

    Args:
        first: the number from which on they are its own. Until this exit none of the others is touched: there may be
            thousands, and the system copies a page of a fork that is written to.
    """
    registry: dict[object, Any] = weakref.finalize._registry  # type: ignore[attr-defined]
    newest = next(reversed(registry.values()), None)
    if newest is None or newest.index < first:
        return
    for info in list(registry.values()):
        if info.index < first:
            info.atexit = False
    weakref.finalize._exitfunc()  # type: ignore[attr-defined]


def _list_terminal_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in ("SIGHUP", "SIGQUIT") if name in signal.Signals.__members__]


def _wait_for_end(lifeline: PipeEnd) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
