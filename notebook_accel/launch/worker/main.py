"""The worker process: from its first act to its last."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
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
from .. import children, descriptors, leftovers
from ..signals import STACK_SIGNAL
from ..transfer import cell_sources, failures
from ..transfer.settings import Settings
from ..transfer.shared_memory import SharedPickle
from ..transfer.unpicklable import pack_value
from . import lifeline, spawned_children
from .metrics_reporter import WorkerReporter
from .order_listener import OrderListener

_OBEY_SECONDS = 10.0  # that daemons have to end when they are asked to


@dataclass(frozen=True, kw_only=True)
class WorkerEnds:
    """A worker's ends of what joins it with the notebook.

    Attributes:
        events: the socket for events to the notebook and orders from it. The first word on it says to begin.
        stdout: the pipe that its output goes to.
        stderr: likewise for its errors.
        lifeline: descriptor of a pipe that closes when whoever started the worker ends; it is killed then.
    """

    events: socket.socket
    stdout: PipeEnd
    stderr: PipeEnd
    lifeline: int


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One worker of a run: what the notebook, or whoever starts the process, hands to it.

    Attributes:
        rank: global rank.
        environment: all environment variables of the process.
        sends_value: whether the notebook wants the value that the function returns.
        forked: whether the process is a fork of the notebook's.
        with_ipython: whether to import IPython, because the notebook has.
        threads: threads of torch's CPU kernels; None leaves torch's own choice.
        child_start_method: how processes of the worker's own start, data loader workers for example; None leaves the
            default of `multiprocessing`.
        in_background: whether the notebook runs cells meanwhile: then an interrupt is not meant for this worker.
        directory: the working folder; None keeps that of the process.
        settings: the notebook's, set before the function is called.
        sources: lines of the notebook's cells, by the file name under which they were compiled.
        serve: what the worker does instead of calling a function once: it serves calls until it is told to leave.
        has_all_nodes: whether the launcher that starts the process has the ranks of all nodes.
        leaves_last: whether the process holds the store where all ranks meet: then it waits until the others have left.
        setup: called before the function, when all workers are started.
        sockets: the folder for the sockets of multiprocessing; None leaves its own choice.
    """

    rank: int
    environment: Mapping[str, str]
    sends_value: bool
    forked: bool
    with_ipython: bool
    threads: int | None
    child_start_method: str | None
    in_background: bool
    directory: str | None
    settings: Settings
    sources: Mapping[str, list[str]]
    serve: Callable[[socket.socket, Emitter, capture.Capture, StopPoint], None] | None = None
    has_all_nodes: bool = False
    leaves_last: bool = False
    setup: Callable[[], None] | None = None
    sockets: str | None = None


def main(spec: WorkerSpec, ends: WorkerEnds, payload: Any) -> NoReturn:
    """Run a function, and end the process; never returns to the caller.

    Args:
        spec: how to run it.
        ends: join the process with the notebook.
        payload: the tuple of function and arguments, or the `SharedPickle` that holds it; None where the spec has
            `serve`.
    """
    __tracebackhide__ = True
    emitter = Emitter(ends.events, spec.rank)
    output = capture.Capture(ends.stdout, ends.stderr, emitter)
    code = 1
    try:
        _become_worker(spec, ends.lifeline)
        code = _work(spec, ends.events, payload, emitter, output)
    except KeyboardInterrupt:
        pass
    finally:
        _leave(code, output)


def _become_worker(spec: WorkerSpec, end: int) -> None:
    """Give the process its own session, signals and environment, and drop what is the kernel's."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    lifeline.follow(end)
    if spec.forked:
        _forget_kernel()
    _forget_finalizers()
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)
    if spec.in_background:
        # Before `setsid` above, an interrupt of another cell reached this process too, as part of the kernel's process
        # group. It is blocked and pending. To ignore the signal, even for a moment, discards what is pending.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable(2)
    if STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, 2, all_threads=False)
    environ.restore(spec.environment)
    time.tzset()
    if not spec.forked and spec.directory:
        os.chdir(spec.directory)
    if spec.child_start_method is not None:
        children.set_default(spec.child_start_method)
    if spec.sockets is not None:
        children.use_sockets_folder(spec.sockets)
    spawned_children.hand_down()
    capture.unused_stdin()


def _work(
    spec: WorkerSpec, events: socket.socket, payload: Any, emitter: Emitter, output: capture.Capture
) -> int:
    """Call the function, and send what it returns or raises; return the exit code."""
    __tracebackhide__ = True
    code, others_left = 0, threading.Event()
    try:
        _prepare_for_function(spec, output)
        stop_point = StopPoint()
        place = topology.from_environ()
        reporter = WorkerReporter(
            emitter, capture.flush_pipes, stop_point, place, has_all_nodes=spec.has_all_nodes
        )
        runtime.set_reporter(reporter)
        if events.recv(len(GO)) != GO:
            return 1  # the notebook has given up
        if spec.serve is not None:
            spec.settings.restore(forked=spec.forked)
            spec.serve(events, emitter, output, stop_point)
            _leave_group()
            return 0
        listener = OrderListener(
            events,
            emitter,
            stop_point,
            functools.partial(_note_leave, others_left),
            output.write_out,
        )
        if spec.setup is not None:
            spec.setup()
        function, args = _open(payload)
        spec.settings.restore(forked=spec.forked)  # after the imports of the function's modules
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
    """Set up what the function expects to find: displays, bars, threads, lines of cells."""
    if environ.flag(finder.VARIABLE):
        finder.install()
    if spec.with_ipython:
        import IPython.core.interactiveshell  # noqa: F401
    output.install()
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    cell_sources.install(spec.sources)


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
        left = leftovers.list_children()
        daemons = [child for child in multiprocessing.active_children() if child.daemon]
        threading.Thread(target=_kill_deaf, args=(daemons,), daemon=True).start()
        with contextlib.suppress(Exception):
            children.wait_at_exit()
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        output.close()
        leftovers.end_children(left)
    finally:
        os._exit(code)


def _kill_deaf(daemons: Sequence[BaseProcess]) -> None:
    """Kill, after a while, daemons that multiprocessing asks to end at exit: it waits for a deaf one for ever."""
    time.sleep(_OBEY_SECONDS)
    for child in daemons:
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
