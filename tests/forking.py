"""A program: imports libraries once, and forks a process for each Python program that it is told; see `forker`.

The copy has what such a program starts with: arguments, variables, working folder, streams, a session, `__main__`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import types
from functools import partial
from typing import Any

MESSAGE_BYTES = 1 << 17


def main() -> dict[str, Any] | None:
    """Serve until the socket closes, and return None; in a copy, return what it shall run."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = socket.socket(fileno=int(sys.argv[1]))
    ended: dict[int, int] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(server, MESSAGE_BYTES, 3)
        if not data:
            return None
        question = json.loads(data)
        answer = partial(send, server, question["number"])
        host = os.getpid()
        try:
            if "wait" in question:
                answer(wait(question["wait"], ended))
            else:
                load(question["libraries"])
                pid = os.fork()
                if pid == 0:
                    become(question, descriptors)
                    answer(os.getpid())
                    server.close()
                    return question
                ended.pop(pid, None)
        except Exception as error:
            answer(None, f"{type(error).__name__}: {error}")
            if os.getpid() != host:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def send(server: socket.socket, number: int, found: object, error: str | None = None) -> None:
    """Answer the question of this number."""
    server.send(json.dumps([number, found, error]).encode())


def wait(pid: int, ended: dict[int, int]) -> int | None:
    """Return the status of a copy if it has ended, as often as it is asked for."""
    if pid not in ended:
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        ended[pid] = status
    return ended[pid]


def load(libraries: list[str]) -> None:
    """Import libraries for all copies to come."""
    missing = [name for name in libraries if name not in sys.modules]
    if not missing:
        return
    os.environ["JPY_PARENT_PID"] = str(os.getpid())  # a kernel ends with its parent; ipykernel reads it once
    for name in missing:
        importlib.import_module(name)
    if threading.active_count() > 1:
        raise RuntimeError(f"a copy would lack the threads {threading.enumerate()}")
    leave_folder_of_torch()
    gc.collect()
    gc.freeze()  # else each copy looks at all of it when it collects and when it ends


def leave_folder_of_torch() -> None:
    """Let no copy remove the temporary folder that some versions of torch make when they are imported."""
    made = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    if made is not None:
        atexit.unregister(made.cleanup)
        made._finalizer.detach()  # it goes with the session's temp folder
        sys.path[:] = [folder for folder in sys.path if folder != made.name]


def become(question: dict[str, Any], descriptors: list[int]) -> None:
    """Make this copy the process of a program that has just started."""
    os.setsid()
    for stream, descriptor in enumerate(descriptors):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(question["environment"])
    if "JPY_PARENT_PID" in os.environ:
        os.environ["JPY_PARENT_PID"] = str(os.getppid())  # a kernel ends with its parent
    os.chdir(question["folder"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    multiprocessing.process.current_process().authkey = os.urandom(32)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a program has not imported them
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's own generator has done so at the fork
    tempfile.tempdir = None


def execute(words: list[str]) -> None:
    """Run `script arguments...`, `-m module arguments...` or `-c code arguments...` as `python` does."""
    sys.orig_argv[:] = [sys.executable, *words]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__["__builtins__"] = __builtins__
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path[0] = ""
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv[:] = words
        path = module.__file__ = os.path.abspath(words[0])
        module.__dict__["__cached__"] = None
        sys.path[0] = os.path.dirname(os.path.realpath(path))
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
    exec(code, module.__dict__)


def leave_out_own_frames(error: BaseException) -> None:
    """Let the excepthook show an error, which ends this copy, without the frames that stand above the program."""
    show, program = sys.excepthook, error.__traceback__
    while program is not None and program.tb_frame.f_code.co_filename == __file__:
        program = program.tb_next
    sys.excepthook = lambda kind, ending, _: show(kind, ending.with_traceback(program), program)


if __name__ == "__main__":
    asked = main()
    if asked is not None:
        try:
            execute(asked["words"])
        except BaseException as error:
            leave_out_own_frames(error)
            raise
