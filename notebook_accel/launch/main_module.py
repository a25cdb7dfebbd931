"""Runs a script or a module as `__main__`, as Python itself does. Imports little, because each rank waits for it."""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.machinery
import io
import os
import sys
import types
from collections.abc import Sequence


def run(kind: str, words: Sequence[str]) -> None:
    """Run a script, a module or a program in this process.

    Args:
        kind: which of them, as `script.Script` names it.
        words: its name and its arguments.

    Raises:
        SystemExit: it ended with an exit code other than 0.
        BaseException: what the script or module raised.
    """
    __tracebackhide__ = True
    if kind == "program":
        _run_program(words)
        return
    sys.argv = list(words)
    if kind == "module":
        _run_module(words[0])
    else:
        _run_script(words[0])


def flush_files() -> None:
    """Write what open files of this process hold back: Python does so at its end, and workers leave without that."""
    for file in gc.get_objects():
        if issubclass(type(file), io.IOBase):
            with contextlib.suppress(Exception):  # it is closed, or for reading
                file.flush()


def _run_script(name: str) -> None:
    __tracebackhide__ = True
    path = os.path.abspath(name)
    if os.path.isdir(path):
        _run_other(name)
        return
    with io.open_code(path) as file:
        source = file.read()
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    if b"\0" in source:  # no text
        _run_other(name)
        return
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(module)["__builtins__"] = builtins
    code = compile(source, path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _run_other(name: str) -> None:
    """Run the module `__main__` of a folder or an archive, or a compiled script."""
    __tracebackhide__ = True
    import runpy  # scripts do not need it

    runpy.run_path(name, run_name="__main__")


def _run_module(name: str) -> None:
    __tracebackhide__ = True
    import runpy

    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_program(words: Sequence[str]) -> None:
    """Run a program below this process, and end as it does."""
    import subprocess  # scripts need none of it

    code = subprocess.run(words, check=False).returncode
    if code < 0:
        os.kill(os.getpid(), -code)
    if code:
        sys.exit(code)
