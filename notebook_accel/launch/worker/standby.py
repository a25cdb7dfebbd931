"""The process that stands by for launches: it has imported what workers need, and becomes their fork server."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final, NoReturn

from ... import collector, runtime
from .. import socket_owners

_WARM: Final = "notebook_accel.launch.worker.warm"
_SHELL: Final = "IPython.core.interactiveshell"
COMPILER: Final = "torch._dynamo"
"""What a worker that trains needs besides."""
LOAD: Final = b"l"
"""Says to import torch's compiler."""
SERVE: Final = b"s"
"""Comes with the descriptors of a fork server, before its code."""
MAIN: Final = ("__main__", "__mp_main__")
"""The names of the module that a program is; the second is of multiprocessing."""
NAME: Final = "accel-standby"
"""As the system lists the process, where it lists names: a copy has the command line of its kernel."""
_NAME_FILE: Final = Path("/proc/self/comm")
_BYTES: Final = 1 << 16
_MOST_FDS: Final = 8


def become_copy(fd: int, name: str) -> NoReturn:
    """In a fork of the notebook's process: leave all that is the notebook's, and stand by.

    Args:
        fd: the end of the socket to wait at.
        name: by which the system lists the notebook's process.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    kept = [sys.modules.get(main) for main in MAIN]  # taken apart, they would do what their finalizers do
    try:
        _leave_notebook(fd)
        os.register_at_fork(after_in_child=functools.partial(change_name, name))
        stand_by(fd, "IPython" in sys.modules)
    finally:
        del kept
        os._exit(1)


def _leave_notebook(fd: int) -> None:
    """Keep no descriptor, signal handler, exit handler and variable of the notebook's."""
    if sys.platform == "win32":
        raise NotImplementedError
    from ...stream.capture import forward  # here: the notebook imports this module with the package

    os.setsid()
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT}:
        if callable(signal.getsignal(signum)):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is blocked, until a worker is ready for it
    threading.settrace(None)
    threading.setprofile(None)
    atexit._clear()
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as this process
    for stream in (sys.stdout, sys.stderr):
        forward(stream, nowhere)
    _lead_nowhere(map(int, os.listdir("/proc/self/fd")), (fd, nowhere.fileno()))
    runtime.forget()
    runtime.standby().clear()
    _set_defaults()
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules.pop("__mp_main__", None)
    gc.freeze()


def _set_defaults() -> None:
    """Set back what a fresh process would not have of the notebook's."""
    import torch

    torch.set_default_dtype(torch.float32)
    if getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None) is not None:
        torch.set_default_device(None)  # to ask which it is would start that device
        # `get_default_device` raises at None, in torch before 2.10
        del torch._GLOBAL_DEVICE_CONTEXT.device_context
    torch.set_grad_enabled(True)
    if (
        torch.are_deterministic_algorithms_enabled()
    ):  # to set it imports torch's compiler, which takes seconds
        torch.use_deterministic_algorithms(False)
    cloudpickle = sys.modules.get("cloudpickle.cloudpickle")
    for name in ("_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_DYNAMIC_CLASS_TRACKER_BY_ID"):
        if isinstance(classes := getattr(cloudpickle, name, None), MutableMapping):
            classes.clear()  # else a class that arrives would be the one of the notebook, changed


def _lead_nowhere(fds: Iterable[int], kept: Collection[int]) -> None:
    """Let descriptors lead nowhere, but some; closed, their numbers would be those of other files."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        if fd != nowhere and fd not in kept:
            with contextlib.suppress(OSError):  # of the list itself
                os.fstat(fd)
                os.dup2(nowhere, fd, inheritable=fd <= 2)
    os.close(nowhere)


def stand_by(fd: int, with_ipython: bool) -> NoReturn:
    """Import what workers need, and wait until a launch takes this process for its fork server, or the notebook ends.

    Args:
        fd: the end of the socket to wait at.
        with_ipython: whether to import IPython too.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    if os.getsid(0) != os.getpid():
        os.setsid()
        _lead_nowhere((0, 1, 2), (fd,))
        os.register_at_fork(after_in_child=functools.partial(change_name, change_name(NAME)))
    notebook = socket_owners.find(os.getppid())
    code, *arguments = _wait(fd, [_SHELL] * with_ipython + [_WARM])
    if arguments:
        sys.argv = ["-c", *arguments]
    try:
        contextvars.Context().run(exec, code, vars(sys.modules["__main__"]))
    finally:
        socket_owners.remove_folders_of(notebook)  # of one that was killed
        os._exit(0)


def change_name(name: str) -> str:
    """Change the name by which the system lists this process, and return that before; empty where it lists none.

    Args:
        name: of 15 letters at most.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            before = _NAME_FILE.read_text().strip()
            _NAME_FILE.write_text(name)
            return before
    return ""


def _import(name: str) -> None:
    """Import a module; where that fails, the worker that needs it tells why."""
    with contextlib.suppress(Exception), collector.pause():
        importlib.import_module(name)
    gc.freeze()  # else each fork would copy pages that it only counts references in


def _wait(fd: int, modules: Iterable[str]) -> list[str]:
    """Return what a fork server runs, once a launch has said so and its descriptors are in their places.

    Args:
        fd: the end of the socket to wait at.
        modules: what to import before; the notebook is told which are there.

    Returns:
        The code, empty where the notebook has ended, and the arguments of the command line.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    with socket.socket(fileno=fd) as connection:
        data, received = LOAD, list[int]()
        while data == LOAD:
            for name in modules:
                _import(name)
            loaded = [name for name in (_SHELL, _WARM, COMPILER) if name in sys.modules]
            with contextlib.suppress(OSError):  # the notebook has ended
                connection.sendall("".join(f"{name}\n" for name in loaded).encode())
            data, received, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
            modules = [COMPILER]
        if not data:
            return [""]
        text = b""
        while data := connection.recv(_BYTES):
            text += data
    order = json.loads(text)
    _take_limits(order)
    _place(received, order["fds"])
    return list(map(str, order["words"]))


def _take_limits(order: Mapping[str, Any]) -> None:
    """Take the limits, cores and file mode that the notebook has now."""
    if sys.platform == "win32":
        raise NotImplementedError
    import resource

    for kind, soft, hard in order["limits"]:
        with contextlib.suppress(OSError, ValueError):  # a limit that was raised by somebody with more rights
            resource.setrlimit(kind, (soft, hard))
    if sys.platform == "linux":
        if "umask" in order:
            os.umask(order["umask"])
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, order["cores"])


def _place(received: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that they have in the notebook; what had these leads elsewhere, or nowhere."""
    if sys.platform == "win32":
        raise NotImplementedError
    import fcntl

    above = max([*received, *numbers]) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in received]
    for fd in received:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number, inheritable=False)
        os.close(fd)
