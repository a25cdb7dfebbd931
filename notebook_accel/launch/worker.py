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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from .. import environ, runtime
from ..events import LeaveOrder, Order, Phase, Result
from ..stopping import StopPoint
from ..stream import capture, displays
from ..stream.emit import Emitter
from ..stream.wire import GO, PipeEnd
from . import failures, sources
from .culprit import pack_value
from .hanging import STACK_SIGNAL
from .listener import Listener
from .randomness import RandomStates
from .report import WorkerReporter
from .segment import Segment

_LAST_COLLECTIVE = 10.0  # seconds that a rank waits for its peers at the end
_LONGEST_PAUSE = 0.25
_F_SETSIG = 10  # Linux: which signal O_ASYNC sends


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One worker's place in a run: what the notebook hands to its process.

    `payload` is the function with its arguments, or a segment that holds them. `foreign_fds` are the notebook's
    descriptors that a forked worker has to close. Without pipes for `stdout` and `stderr` output goes as events.
    `child_start_method` is how the worker's own children start, data
    loader workers for example. `serve` is what a process that stays does instead of calling a function: it has no
    payload. `leaves_last` is for the rank whose process holds the store where all meet: it waits to be told that the
    others have left. `prepare` is called before the function, when all workers are started.
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
    foreign_fds: Sequence[int] = ()
    serve: Callable[[socket.socket, Emitter, capture.Capture, StopPoint], None] | None = None
    leaves_last: bool = False
    prepare: Callable[[], None] | None = None


def main(seat: Seat) -> NoReturn:
    """Run the seat's function and leave; never returns to the caller."""
    __tracebackhide__ = True
    emitter = Emitter(seat.events, seat.rank)
    output = capture.Capture(seat.stdout, seat.stderr, emitter)
    code = 1
    try:
        _settle(seat)
        code = _work(seat, emitter, output)
    except KeyboardInterrupt:
        pass
    finally:
        _leave(code, output)


def _settle(seat: Seat) -> None:
    """Make the process a worker: its own session, signals, environment and threads; nothing of the kernel's."""
    for fd in seat.foreign_fds:
        os.close(fd)
    if sys.platform != "win32" and os.getsid(0) != os.getpid():
        os.setsid()
    _die_with_notebook(seat.lifeline)
    if seat.forked:
        _forget_kernel()
    _forget_finalizers()
    for signum in (signal.SIGTERM, *_terminal_signals()):
        signal.signal(signum, signal.SIG_DFL)
    if (
        seat.in_background
    ):  # an interrupt of another cell, sent to all of the kernel's group before this left it
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    faulthandler.enable(2)
    if sys.platform != "win32" and STACK_SIGNAL is not None:
        faulthandler.register(STACK_SIGNAL, 2, all_threads=False)
    environ.restore(seat.environment)
    if not seat.forked and seat.directory is not None:
        os.chdir(seat.directory)
    if seat.child_start_method is not None:
        multiprocessing.set_start_method(seat.child_start_method, force=True)
    capture.unused_stdin()


def _work(seat: Seat, emitter: Emitter, output: capture.Capture) -> int:
    """Call the function; send what it returns or raises. Returns the exit code."""
    __tracebackhide__ = True
    code, others_left = 0, threading.Event()
    try:
        _equip(seat, output)
        stop_point = StopPoint()
        runtime.set_reporter(WorkerReporter(emitter, output.flush, stop_point))
        if seat.events.recv(len(GO)) != GO:
            return 1  # the notebook has given up
        if seat.serve is not None:
            seat.serve(seat.events, emitter, output, stop_point)
            _leave_group()
            return 0
        listener = Listener(seat.events, emitter, stop_point, functools.partial(_note_leave, others_left))
        if seat.prepare is not None:
            seat.prepare()
        function, args = seat.payload.open() if isinstance(seat.payload, Segment) else seat.payload
        emitter.emit(Phase(rank=seat.rank, time=emitter.now(), name="running", pid=os.getpid()))
        try:
            value = function(*args)
        finally:
            listener.tell()  # how far it came
        _finish(seat, emitter, value)
    except SystemExit as error:
        code = _exit_code(error, seat, emitter)
    except BaseException as error:
        failures.report(emitter, error)
        return 1
    if seat.leaves_last and code == 0:
        others_left.wait()
    return code


def _note_leave(others_left: threading.Event, order: Order) -> None:
    assert isinstance(order, LeaveOrder), f"nobody obeys {order}"
    others_left.set()


def _equip(seat: Seat, output: capture.Capture) -> None:
    """Give the process what the function expects to find: displays, bars, threads, random states."""
    if seat.with_ipython:
        import IPython.core.interactiveshell  # noqa: F401
    output.install()
    if seat.threads is not None:
        torch.set_num_threads(seat.threads)
    sources.install(seat.sources)
    seat.random_states.restore(forked=seat.forked)


def _finish(seat: Seat, emitter: Emitter, value: Any) -> None:
    __tracebackhide__ = True
    displays.flush_figures()
    parcel = pack_value(value if seat.sends_value else None)
    emitter.emit(Result(rank=seat.rank, time=emitter.now(), value=parcel.pickled, buffers=parcel.buffers))
    _leave_group()


def _leave_group() -> None:
    """Leave the process group when all ranks are done with it: one that leaves early resets its peers' connections.

    The others may be in their last collective still, or not even through making the group. Closing frees devices;
    gloo has none, and its threads take 20 ms to see that they are to end. They end with the process as well, and exit
    handlers find a group of gloo still open. Torch's own wait would warn in the cell of each that waited in vain.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    with contextlib.suppress(Exception):
        store = torch.distributed.distributed_c10d._get_default_store()
        if store.add("notebook_accel/done", 1) == torch.distributed.get_world_size():
            store.set("notebook_accel/all_done", "1")
        began = time.monotonic()
        while not store.check(["notebook_accel/all_done"]) and time.monotonic() - began < _LAST_COLLECTIVE:
            time.sleep(min(_LONGEST_PAUSE, 0.001 + (time.monotonic() - began) / 8))
    with contextlib.suppress(Exception):
        if torch.distributed.get_backend() != "gloo":
            torch.distributed.destroy_process_group()


def _exit_code(error: SystemExit, seat: Seat, emitter: Emitter) -> int:
    """Return the code that `sys.exit` asked for; a plain exit counts as returning None."""
    if error.code is None or error.code == 0:
        _finish(seat, emitter, None)
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int, output: capture.Capture) -> NoReturn:
    """End the process: its own exit handlers run, the kernel's do not."""
    try:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # waits for its processes; a fork has no exit handler for it
        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        output.close()
    finally:
        os._exit(code)


def _forget_kernel() -> None:
    """Drop what a fork copied from the kernel and only the kernel may use."""
    signal.set_wakeup_fd(-1)
    atexit._clear()
    runtime.reset()
    gc.freeze()


def _forget_finalizers() -> None:
    """Let finalizers (`weakref.finalize`) that are there already not run at the end; the function's own do.

    A fork's are the kernel's: its temporary directories, say. A fresh process's are torch's, which takes its operators
    apart one by one: that takes longer than all else at the end, and the process ends anyhow.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False
    if getattr(weakref.finalize, "_registered_with_atexit", False):
        run = weakref.finalize._exitfunc  # type: ignore[attr-defined]
        atexit.unregister(run)
        atexit.register(run)


def _terminal_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in ("SIGHUP", "SIGQUIT") if name in signal.Signals.__members__]


def _die_with_notebook(lifeline: PipeEnd) -> None:
    """Let the process and all that it starts be killed when the notebook's end of the pipe closes.

    On Linux the system itself sends SIGKILL to the process group, also while C code runs or hangs; elsewhere a
    thread waits for it.
    """
    try:
        import fcntl

        if sys.platform != "linux":
            raise OSError("only Linux chooses the signal of O_ASYNC")
        fd = lifeline.fileno()
        fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    except (ImportError, OSError, AttributeError):
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()
        return
    if lifeline.poll(0):
        os._exit(1)


def _wait_for_end(lifeline: PipeEnd) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    if sys.platform != "win32":
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)
