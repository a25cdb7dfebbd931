"""A process that stands by for launches from a kernel that may not be forked: the first one waits for no import.

It is made when a cell ends. Where the kernel may be forked at that moment it is a copy of it, which takes some
milliseconds and 2 MiB; else it is a fresh Python, which imports torch meanwhile. A launch that needs a fork server
takes it for that. Only Jupyter kernels have one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from ... import environ, interrupts, probes, runtime
from .. import descriptors
from ..worker.standby import COMPILER, LOAD, MAIN, NAME, SERVE, become_copy, change_name
from . import end_watch

if TYPE_CHECKING:
    from ..checks import compiler_preload

VARIABLE: Final = "NOTEBOOK_ACCEL_STANDBY"
_MANY_MODULES: Final = 50  # that a newer copy has to have besides
_MANY_FILES: Final = 256
_MOST_SAID: Final = 4096
_MOST_LOST: Final = 3
_MOST_BYTES: Final = 512 << 20  # of the kernel's memory that a copy may keep from being freed
_OF_KERNELS: Final = ("ipykernel", "IPython", "zmq", "tornado", "jupyter_client", "debugpy", "_pydev")
"""How the names of modules start whose threads a kernel has; they hold no lock that a copy waits for."""
_PACKAGES: Final = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_NOBODYS: Final = (*MAIN, "_remote_module_non_scriptable")
"""Modules that count as no file of the user's; the last one is written by torch up to 2.9 when it is imported."""
_SERVING: Final = threading.Lock()
_SERVES: Final = "from multiprocessing.forkserver import main;"
_FRESH: Final = (
    "import sys; sys.path[:] = {path!r}; from {module} import stand_by; stand_by({fd}, {with_ipython})"
)


class Standby:
    """A process that stands by, as the notebook sees it.

    Args:
        pid: its process id; it is a child of this process.
        connection: our end of the socket at which it waits. It ends when nobody has that end any more.
        is_copy: whether it is a copy of this process.

    Attributes:
        has_compiler: whether it has torch's compiler, or was told to import it.
        is_taken: whether it is a fork server now.
    """

    def __init__(self, pid: int, connection: socket.socket, *, is_copy: bool) -> None:
        self.pid = pid
        self.is_copy = is_copy
        self.is_taken = False
        self._is_reaped = False
        self._sending = threading.Lock()
        self.has_compiler = is_copy and COMPILER in sys.modules
        self._said = b""
        self._connection = connection
        descriptors.keep_from_forks(self)

    def filenos(self) -> list[int]:
        """Return the descriptors that no process keeps that is forked from this one."""
        return [] if self.is_taken else [self._connection.fileno()]

    @property
    def has_ended(self) -> bool:
        """Whether something has killed it."""
        if sys.platform == "win32":
            raise NotImplementedError
        if self.is_taken:  # multiprocessing waits for it
            return end_watch.has_ended(self.pid)
        try:
            self._is_reaped = self._is_reaped or os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # other code has waited for it
            self._is_reaped = True
        return self._is_reaped

    def hand_over(self, words: Sequence[str], fds: Sequence[int]) -> int:
        """Let the process run what a fork server runs, and return its process id.

        Args:
            words: the code that a fresh Python would run for that, and the arguments of its command line.
            fds: descriptors that it finds by the same numbers.

        Raises:
            OSError: it has ended, or is stopped.
        """
        if sys.platform == "win32":
            raise NotImplementedError
        if self.has_ended or _is_stopped(self.pid):
            raise ProcessLookupError(f"process {self.pid} does not stand by any more")
        order = json.dumps({"words": list(words), "fds": list(fds), **_describe_limits()})
        with self._sending:
            socket.send_fds(self._connection, [SERVE], list(fds))
            self._connection.sendall(order.encode())
            self.is_taken = True
            self._give_up()
        return self.pid

    def load_compiler(self) -> None:
        """Let the process import torch's compiler, which a worker that trains needs: it takes over a second.

        Raises:
            OSError: it has ended.
        """
        with self._sending:
            self.has_compiler = True
            if not self.is_taken:
                self._connection.sendall(LOAD)

    def has_imported(self, names: Iterable[str]) -> bool:
        """Return whether it has said that it has imported these modules, and all else that it was told to import.

        Args:
            names: the modules' full names.
        """
        if self.is_taken or sys.platform == "win32":
            return False
        with self._sending, contextlib.suppress(OSError):  # it has said nothing
            self._said += self._connection.recv(_MOST_SAID, socket.MSG_DONTWAIT)
        told = {COMPILER} if self.has_compiler else set()
        return {*names, *told} <= set(self._said.decode().split("\n"))

    def end(self) -> None:
        """End the process, unless it is a fork server."""
        if self.is_taken or sys.platform == "win32":
            return
        self._give_up()
        if not self.has_ended:  # else its number may be another process's by now
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _give_up(self) -> None:
        descriptors.forget(self)
        self._connection.close()


def find() -> Standby | None:
    """Return the process that stands by, or has become the fork server of launches; None without one."""
    found: list[Standby] = runtime.standby()
    return found[0] if found else None


def watch_cells() -> None:
    """Have a process standing by from the end of a cell on, where this process is a Jupyter kernel."""
    shell = probes.find_kernel_shell()
    if shell is not None and sys.platform != "win32" and environ.flag(VARIABLE, default=True):
        shell.events.register("post_run_cell", _CellWatcher(shell))


class _CellWatcher:
    """What IPython calls at the end of each cell, until a fork server runs."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._owner = os.getpid()
        self._num_lost = 0  # of those that ended before a launch took them
        self._looked = 0  # how many modules there were when a copy was thought of last
        self._training: compiler_preload.TrainingWatch | None = None

    def __call__(self, result: object = None) -> None:
        # the cell is over: an interrupt that comes now has nothing to interrupt
        with contextlib.suppress(KeyboardInterrupt), interrupts.delay_interrupt():
            self._look()

    def _look(self) -> None:
        if not probes.has_torch() or threading.current_thread() is not threading.main_thread():
            return
        before = find()
        is_over = runtime.fork_server() is not None or _has_server() or self._num_lost == _MOST_LOST
        if os.getpid() != self._owner or is_over:
            self._shell.events.unregister("post_run_cell", self)
            if os.getpid() == self._owner and before is not None and not before.is_taken:
                _drop(before)
            return
        if before is not None and before.has_ended:
            _drop(before)
            before = None
            self._num_lost += 1
            self._training = None  # the next one has not heard of functions that train
        with contextlib.suppress(OSError):  # the system has no process or descriptor left: launches say so
            has_grown = len(sys.modules) >= self._looked + _MANY_MODULES
            if before is None or (before.is_copy and has_grown):
                self._looked = len(sys.modules)
                _replace(before)
            self._prepare_to_train()

    def _prepare_to_train(self) -> None:
        """Let the process import torch's compiler where the notebook has it, or a function that trains."""
        from ..checks import compiler_preload  # here: it needs torch

        if self._training is None:
            self._training = compiler_preload.TrainingWatch()
        trains = self._training.look(list(self._shell.user_ns.values())) or compiler_preload.is_loaded()
        standby = find()
        if standby is not None and not standby.has_compiler and trains:
            standby.load_compiler()


def _drop(standby: Standby) -> None:
    runtime.standby().clear()
    standby.end()


def _replace(before: Standby | None) -> None:
    """Have a copy of this process stand by, or a fresh one where there is none yet and no copy can be made."""
    if not find_obstacle():
        made = _make_copy()
    elif before is None:
        made = _start_fresh()
    else:
        return
    runtime.standby()[:] = [made]
    if before is not None:
        if before.has_compiler:
            made.load_compiler()
        before.end()


def _has_server() -> bool:
    module = sys.modules.get("multiprocessing.forkserver")
    return module is not None and module._forkserver._forkserver_pid is not None


def find_obstacle() -> str:
    """Return why no copy of this process is made now, empty where one can be."""
    if sys.platform != "linux":
        return "only Linux forks processes that have threads"
    from ..checks import fork_obstacles  # here: it needs torch

    for reason in fork_obstacles.reasons():
        return str(reason)
    if sys.gettrace() is not None or sys.getprofile() is not None:
        return "a debugger or profiler follows this process"
    if others := [thread.name for thread in threading.enumerate() if not _is_kernels(thread)]:
        return f"the thread {others[0]} may hold locks"
    if any(not run.is_over for run in runtime.runs()) or any(ref() for ref in runtime.sessions()):
        return "a run or a session has threads in this process"
    if _read_memory() > _MOST_BYTES:
        return "a copy would keep much memory from being freed"
    if path := _find_open_file():
        return f"{path} is open for writing"
    if module := _find_own_module():
        return f"the module {module} may be edited later, and its variables changed"
    return ""


def _is_kernels(thread: threading.Thread) -> bool:
    """Return whether a thread is the main thread, or one that kernels have."""
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None))
    is_known = any(isinstance(name, str) and name.startswith(_OF_KERNELS) for name in modules)
    return is_known or thread is threading.main_thread()


def _read_memory() -> int:
    """Return the bytes of memory that are this process's own or shared, and of no file, as the system counts them."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        kilobytes = [int(line.split()[1]) for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(kilobytes) << 10


def _find_open_file() -> str:
    """Return the path of a file that is open for writing: what a copy wrote would be lost.

    IPython's history is no such file, nor is what the kernel's own output goes to, a log of the server perhaps.
    """
    copies = [getattr(stream, "_original_stdstream_copy", None) for stream in (sys.stdout, sys.stderr)]
    standard = {_read_link(fd) for fd in (0, 1, 2, *copies) if fd is not None}
    names = os.listdir("/proc/self/fd")
    if len(names) > _MANY_FILES:
        return f"one of {len(names)} files"
    for name in names:
        path = _read_link(name)
        is_plain = path.startswith("/") and not path.startswith(("/dev/", "/memfd:", "/proc/"))
        if is_plain and path not in standard and "history.sqlite" not in path and _is_written(name):
            return path
    return ""


def _read_link(fd: object) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def _is_written(fd: str) -> bool:
    if sys.platform == "win32":
        raise NotImplementedError
    with contextlib.suppress(OSError, IndexError, ValueError):
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
        return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _find_own_module() -> str:
    """Return the name of a module that is the user's own, empty without one; of libraries nobody edits the modules."""
    own = Path(__file__).parents[2]
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), own, own.parent / "widgets")
    folders = tuple(os.path.join(path, "") for path in libraries)
    for name, module in list(sys.modules.items()):
        if name not in _NOBODYS and isinstance(module, ModuleType):
            values = object.__getattribute__(module, "__dict__")  # it may be one that loads when asked
            path = values.get("__file__")
            is_own = isinstance(path, str) and not path.startswith(folders)
            if is_own and not any(folder in path for folder in _PACKAGES):
                return name
    return ""


def _describe_limits() -> dict[str, Any]:
    """Return what processes that start now inherit from this one besides."""
    if sys.platform == "win32":
        raise NotImplementedError
    import resource

    kinds = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
    found: dict[str, Any] = {"limits": [(kind, *resource.getrlimit(kind)) for kind in dict.fromkeys(kinds)]}
    if sys.platform == "linux":
        found["cores"] = sorted(os.sched_getaffinity(0))
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
        if words := status.partition("Umask:")[2].split():  # since Linux 4.7
            found["umask"] = int(words[0], 8)
    return found


def _is_stopped(pid: int) -> bool:
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return True


def _make_copy() -> Standby:
    """Fork this process; the copy waits until a launch takes it.

    Raises:
        OSError: the system gives no further process or descriptor.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    ours, theirs = socket.socketpair()
    with theirs, interrupts.block_interrupt_in_children():
        name = change_name(NAME)  # the copy has it from the start
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about any thread
                pid = os.fork()
            if pid == 0:
                become_copy(theirs.fileno(), name)
        except BaseException:
            ours.close()
            raise
        finally:
            change_name(name)
    return Standby(pid, ours, is_copy=True)


def _start_fresh() -> Standby:
    """Start a Python that imports what workers need and waits until a launch takes it.

    Raises:
        OSError: the system gives no further process or descriptor.
    """
    from multiprocessing import spawn, util

    ours, theirs = socket.socketpair()
    with theirs, interrupts.block_interrupt_in_children():
        module = __package__.rpartition(".")[0] + ".worker.standby"
        path = [str(folder) for folder in sys.path]
        code = _FRESH.format(path=path, module=module, fd=theirs.fileno(), with_ipython=True)
        python = os.fsencode(spawn.get_executable())
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            pid = util.spawnv_passfds(python, [python, *flags, "-c", code], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    return Standby(pid, ours, is_copy=False)


def find_usable(options: Mapping[str, Any]) -> Standby | None:
    """Return the process that a launch's fork server may be, or is; None without one.

    Args:
        options: the arguments of the launch. With a start method by hand no server is made of what stands by.
    """
    standby = find()
    if standby is None:
        return None
    if standby.has_ended:
        if not standby.is_taken:
            _drop(standby)
        return None
    if standby.is_taken:
        return standby if standby.pid == runtime.fork_server() else None
    if options.get("start_method", "auto") != "auto" or _has_server() or _is_stopped(standby.pid):
        return None
    return standby


def find_server(command: Iterable[str | bytes]) -> list[str]:
    """Return the code of multiprocessing's fork server in a command line, and what follows; empty for another program.

    Since Python 3.14 the arguments of this process follow.

    Args:
        command: the words, of Python.
    """
    words = list(map(os.fsdecode, command))
    found = words[words.index("-c") + 1 :] if "-c" in words else []
    return found if found and _SERVES in found[0] else []


@contextlib.contextmanager
def serve_by(standby: Standby | None) -> Iterator[None]:
    """Let the fork server that multiprocessing starts in the block be the process that stands by, where it can.

    Args:
        standby: the process; None lets the server start as ever.
    """
    from multiprocessing import util

    if standby is None or standby.is_taken:
        yield
        return
    thread = threading.get_ident()

    def take(path: Any, args: Iterable[Any], fds: Sequence[int]) -> Any:
        args = list(args)
        words = find_server(args)
        if threading.get_ident() == thread and words:
            with contextlib.suppress(OSError):  # it was killed, or stands still
                return standby.hand_over(words, fds)
        return start(path, args, fds)

    with _SERVING:
        start: Any = util.spawnv_passfds
        util.spawnv_passfds = take  # type: ignore[assignment]
        try:
            yield
        finally:
            util.spawnv_passfds = start
            if not standby.is_taken:
                _drop(standby)
