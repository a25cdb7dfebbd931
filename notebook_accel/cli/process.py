"""Runs a script or module as Python itself would, but of all ranks only the first that fails shows its traceback.

python process.py FOLDER [-m] NAME [ARGUMENT ...]

FOLDER is where the ranks of this node agree who was first. The file is run by its path: what it runs imports no more
than it would without it.
"""

import os
import sys

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    del sys.path[0]  # its modules are no top-level ones, and have names that others have

import builtins
import ctypes
import importlib.machinery
import importlib.util
import io
import runpy
import signal
import traceback
import types
from typing import Any

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h

FIRST = "first-{attempt}"
LATER = "later-{attempt}-{rank}"


def main() -> None:
    """Run what the arguments name, and leave as it does."""
    end_with_parent()
    folder, *words = sys.argv[1:]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    try:
        run_module(sys.argv[0]) if is_module else run_script(sys.argv[0])
    except Exception as error:
        show(error, folder)
        sys.exit(1)
    except KeyboardInterrupt as error:
        show(error, folder)
        sys.exit(130)


def end_with_parent() -> None:
    """Have this process ended with the launcher, also where that is killed."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # scripts may ignore others
        if os.getppid() != parent:
            sys.exit(1)


def run_script(path: str) -> None:
    """Run a file as `__main__`."""
    path = os.path.abspath(path)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(module)["__builtins__"] = builtins
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def run_module(name: str) -> None:
    """Run a module as `python -m` does."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def show(error: BaseException, folder: str) -> None:
    """Show the traceback if no other rank of this node failed before, else leave a line about it."""
    environ = _environ()
    place = {"attempt": environ.get("TORCHELASTIC_RESTART_COUNT", "0"), "rank": environ.get("RANK", "0")}
    try:
        with open(os.path.join(folder, FIRST.format(**place)), "x", encoding="utf-8") as file:
            file.write(place["rank"])
    except FileExistsError:
        with open(os.path.join(folder, LATER.format(**place)), "w", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception_only(type(error), error)).strip())
        return
    own, frames = error.__traceback__, error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    sys.excepthook(type(error), error.with_traceback(frames or own), frames or own)
    sys.stderr.flush()


def _environ() -> Any:
    """Return the module `environ`, without the package around it."""
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "environ.py")
    spec: Any = importlib.util.spec_from_file_location("_notebook_accel_environ", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _is_ours(filename: str) -> bool:
    return filename == __file__ or "runpy" in filename


if __name__ == "__main__":
    main()
