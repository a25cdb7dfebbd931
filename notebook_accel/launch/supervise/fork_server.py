"""Multiprocessing's fork server, from which workers are forked where this process itself must not be forked."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import psutil

from ... import devices, interrupts, runtime
from ...errors import LaunchError
from ...stream.readable import wait_readable
from .. import descriptors
from ..checks import compiler_preload, xla_runtime
from ..job import Job
from ..worker.early import Nothing
from . import end_watch, hang_report, standby

_WARM: Final = "notebook_accel.launch.worker.warm"
_LOOK_SECONDS: Final = 0.05
_IMPORT_SECONDS: Final = 100.0
_END_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 3.0
_STOPPED_SECONDS: Final = 0.5
_WATCHING: Final = threading.Lock()
_WORKER_ENDED: Final = "a worker ended before it began: something has killed it"


def start(job: Job, check: Callable[[], None]) -> None:
    """Start the server where it does not run, and wait until it answers: it first imports what workers need.

    An interrupt ends the wait; the server goes on for the next launch.

    Args:
        job: what the workers run.
        check: called several times a second; its exception ends the wait.
    """
    from multiprocessing import forkserver  # not on every system

    server: Any = forkserver._forkserver
    modules = _choose_modules(job, getattr(server, "_preload_modules", ()))
    forkserver.set_forkserver_preload(modules)
    usable = standby.find_usable(job.options)
    is_ready = usable is not None and usable.has_imported(modules)
    known = {server._forkserver_pid, usable and usable.pid}
    descriptors.keep_server_from_forks()
    with explain_end(job, check):
        with interrupts.block_interrupt_in_children(), standby.serve_by(usable):
            try:
                forkserver.ensure_running()
            except ConnectionError:  # Python 3.14 writes to it at once: what stood by was killed just now
                forkserver.ensure_running()
        if server._forkserver_pid == runtime.fork_server():
            _check_it_goes_on(server._forkserver_pid)
            return
        if is_ready and usable is not None and server._forkserver_pid == usable.pid:
            _check_it_stays(usable.pid)
            runtime.set_fork_server(usable.pid)  # it has nothing to import any more
            return
        try:
            _wait_for_answer(check)
        except (ConnectionError, EOFError):
            if server._forkserver_pid not in known:
                raise
            _replace(check)  # it was killed, or an earlier request that was broken off is ending it just now
            _wait_for_answer(check)
        runtime.set_fork_server(server._forkserver_pid)


def start_again(job: Job, check: Callable[[], None]) -> None:
    """Start another server in place of one that a request has found to be ending: it was killed since it answered.

    Args:
        job: what the workers run.
        check: called several times a second; its exception ends the wait.

    Raises:
        LaunchError: the server goes on: what failed is the worker that was requested.
    """
    runtime.set_fork_server(None)
    if not _has_ended(check):
        raise LaunchError(_WORKER_ENDED)
    start(job, check)


@contextlib.contextmanager
def watch_answers() -> Iterator[None]:
    """Let a request for a worker, in the block and this thread, end where the server is stopped.

    Multiprocessing waits for the answer whatever comes, and no interrupt ends that wait.
    """
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    thread = threading.get_ident()

    def read_signed(fd: int) -> Any:
        if threading.get_ident() == thread:
            while not wait_readable(fd, _LOOK_SECONDS):
                _check_it_stays(server._forkserver_pid)
        return read(fd)

    with _WATCHING:
        read: Any = forkserver.read_signed
        forkserver.read_signed = read_signed
        try:
            yield
        finally:
            forkserver.read_signed = read


def _wait_for_answer(check: Callable[[], None]) -> None:
    """Request a process that does nothing, and wait until the server has forked it."""
    from multiprocessing import forkserver

    _wait_until_it_listens(check)
    with interrupts.block_interrupt_in_children():  # one that has ended is started anew
        reader, writer = forkserver.connect_to_new_process([])
    try:
        os.write(writer, pickle.dumps({"sys_path": sys.path}) + pickle.dumps(Nothing()))
        while not wait_readable(reader, _LOOK_SECONDS):
            check()
            _check_it_stays(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
        if not os.read(reader, 1):
            raise EOFError
    finally:
        os.close(writer)
        os.close(reader)


def _wait_until_it_listens(check: Callable[[], None]) -> None:
    """Wait until the server has imported all where it asks for a proof, as of Python 3.14.

    A request waits for that question, and nothing ends the wait. So a connection asks for it that is given up then.
    """
    from multiprocessing import connection, forkserver

    server: Any = forkserver._forkserver
    if not getattr(server, "_forkserver_authkey", None) or sys.platform == "win32":
        return
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(server._forkserver_address)
        while not wait_readable(asking.fileno(), _LOOK_SECONDS):
            check()
            _check_it_stays(server._forkserver_pid)
        with connection.Connection(asking.detach()) as reading:
            reading.recv_bytes()  # else the server would take the end for an error


def _check_it_stays(pid: int) -> None:
    """Raise LaunchError where the server is stopped for longer than a look of a debugger takes."""
    try:
        _check_it_goes_on(pid)
    except LaunchError:
        time.sleep(_STOPPED_SECONDS)
        _check_it_goes_on(pid)


def _check_it_goes_on(pid: int) -> None:
    """Raise LaunchError where the server is stopped: a request waits for its answer, whatever comes."""
    try:
        is_stopped = psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return  # it has just ended: the request fails
    if is_stopped:
        state = hang_report.find_process_state(pid)
        raise LaunchError(f"the fork server, from which workers start, is process {pid}, which {state}")


@contextlib.contextmanager
def explain_end(job: Job, check: Callable[[], None]) -> Iterator[None]:
    """Say why the server has ended where it does not answer any more, or that a worker ended before it began.

    Args:
        job: what the workers run.
        check: called several times a second while the cause is looked for; its exception ends that.

    Raises:
        LaunchError: the server has ended, or a worker.
    """
    if job.start_method != "forkserver":
        yield
        return
    try:
        with _remove_old_socket():
            yield
    except (EOFError, OSError) as error:
        runtime.set_fork_server(
            None
        )  # it ends where a request breaks off: the next launch asks whether it answers
        if not isinstance(error, (EOFError, ConnectionError)):
            raise
        if not _has_ended(check):
            raise LaunchError(_WORKER_ENDED) from error
        raise LaunchError(_explain_end(check)) from error


@contextlib.contextmanager
def _remove_old_socket() -> Iterator[None]:
    """Remove the socket of a server that was killed where another one takes its place: any request may start one."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    before = getattr(server, "_forkserver_address", None)
    try:
        yield
    finally:
        if isinstance(before, str) and before != server._forkserver_address:
            with contextlib.suppress(OSError, ValueError):  # some have no file
                os.unlink(before)


def _has_ended(check: Callable[[], None]) -> bool:
    """Return whether the server has ended; one that is just ending is waited for."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    deadline = time.monotonic() + _LAST_SECONDS
    while server._forkserver_pid is not None and not end_watch.has_ended(server._forkserver_pid):
        if time.monotonic() > deadline:
            return False
        check()
        time.sleep(_LOOK_SECONDS)
    return True


def _replace(check: Callable[[], None]) -> None:
    """Wait until the server has ended, some seconds at most, and start another."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    pid, deadline = server._forkserver_pid, time.monotonic() + _END_SECONDS
    while server._forkserver_pid == pid and time.monotonic() < deadline:
        check()
        time.sleep(_LOOK_SECONDS)
        with interrupts.block_interrupt_in_children():
            forkserver.ensure_running()


def _explain_end(check: Callable[[], None]) -> str:
    """Return why the server has ended: its imports are made once more, in a process whose errors can be read."""
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    text = "the fork server, from which workers start, has ended"
    tries = (f"try:\n    import {name}\nexcept ImportError:\n    pass" for name in server._preload_modules)
    command = [sys.executable, "-c", "\n".join(tries)]  # the server goes on without what it does not find
    try:
        code, said = _run(command, check)
    except (OSError, TimeoutError):
        return text
    return f"{text}; its imports fail here:\n{said}" if code and said else text


def _run(command: Sequence[str], check: Callable[[], None]) -> tuple[int, str]:
    """Return the exit code of a program and what it wrote to stderr.

    Args:
        command: the program and its arguments.
        check: called several times a second; its exception ends the program.

    Raises:
        OSError: it cannot start.
        TimeoutError: it has not ended after `_IMPORT_SECONDS`.
    """
    deadline = time.monotonic() + _IMPORT_SECONDS
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdin=null, stdout=null, stderr=pipe) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=_LOOK_SECONDS)[1]
                    return process.returncode, said.decode("utf-8", "backslashreplace").strip()
                check()
                if time.monotonic() > deadline:
                    raise TimeoutError
        finally:
            process.kill()


def _choose_modules(job: Job, chosen: Sequence[str]) -> list[str]:
    """Return what the server imports, when it starts: what the user told it to, and what every worker needs.

    It starts once in a kernel: where the kernel has torch's compiler, a later launch is taken to need it.

    Args:
        job: what the workers run.
        chosen: what the server was told to import before.
    """
    shell = ["IPython.core.interactiveshell"] if "IPython" in sys.modules else []
    needs_compiler = compiler_preload.is_loaded() or compiler_preload.is_needed_by(job.function)
    trained = [compiler_preload.MODULE] if needs_compiler else []
    is_set_up = job.device_kind is devices.XLA and xla_runtime.is_loaded()
    on_xla = ["torch_xla"] if is_set_up else []
    modules = dict.fromkeys([*chosen, *shell, *trained, *on_xla, _WARM])
    modules.pop("__main__", None)  # the default: it would run a script again
    return list(modules)
