"""Makes this package believe that it runs on macOS or Windows, and takes away what it would not find there.

Python imports this as it starts, where the folder is on the path. `NOTEBOOK_ACCEL_TEST_SYSTEM` names the system,
`darwin` or `win32`. Only modules of this package are changed, as they are loaded. The libraries under them stay those
of Linux, and work, but that processes start by `spawn` where nobody says how. What cannot be shown that way: files that
cannot be renamed while they are open, other separators in paths, a console's Ctrl+C.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final

SYSTEM: Final = os.environ.get("NOTEBOOK_ACCEL_TEST_SYSTEM", "")
PREFIX: Final = "_elsewhere_"
"""Begins the name under which `sys.modules` has the stand-in for a module."""
_PACKAGE: Final = "notebook_accel"
_NOT_ON_MACOS: Final = {
    "mmap": "MADV_DONTDUMP MAP_NORESERVE MAP_POPULATE",
    "fcntl": "F_GETPIPE_SZ F_GETSIG F_NOTIFY F_SETPIPE_SZ F_SETSIG",
    "os": "MFD_CLOEXEC O_DIRECT O_PATH O_TMPFILE copy_file_range eventfd getrandom memfd_create pidfd_open "
    "posix_fadvise sched_getaffinity sched_setaffinity splice",
    "resource": "prlimit",
    "select": "EPOLLERR EPOLLET EPOLLHUP EPOLLIN EPOLLOUT epoll",
    "selectors": "EpollSelector",
    "signal": "SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    "socket": "SCM_CREDENTIALS SOCK_CLOEXEC SOCK_NONBLOCK SOCK_SEQPACKET SO_PASSCRED SO_PEERCRED",
}
_NOT_ON_WINDOWS: Final = {
    "mmap": "MADV_DONTNEED MADV_WILLNEED MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "os": "O_ASYNC O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK WNOHANG chown fchown fork forkpty fstatvfs "
    "getegid geteuid getgid getgroups getloadavg getpgid getpgrp getsid getuid killpg lchown mkfifo mknod "
    "nice openpty posix_spawn pread preadv pwrite pwritev readv register_at_fork sendfile setpgid setpgrp "
    "setsid setuid statvfs sysconf ttyname uname wait wait3 wait4 waitid writev",
    "select": "POLLERR POLLHUP POLLIN POLLOUT poll",
    "selectors": "PollSelector",
    "signal": "ITIMER_REAL SIGALRM SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGTTIN "
    "SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGXCPU SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause "
    "pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait",
    "socket": "AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT MSG_NOSIGNAL SCM_RIGHTS SO_REUSEPORT recv_fds send_fds",
    "time": "CLOCK_MONOTONIC CLOCK_REALTIME clock_gettime tzset",
}
_NO_MODULES_OF_WINDOWS: Final = frozenset(
    {"fcntl", "grp", "pty", "pwd", "readline", "resource", "termios", "tty"}
)


class _StandIn(types.ModuleType):
    """A module with all that another has and is set to, but for what the system lacks or does differently."""

    def __init__(self, name: str, missing: frozenset[str], instead: Mapping[str, Any]) -> None:
        super().__init__(PREFIX + name)
        vars(self).update(_real=importlib.import_module(name), _missing=missing, _instead=dict(instead))

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"{self._real.__name__!r} has no {name!r} on {SYSTEM}")
        return self._instead[name] if name in self._instead else getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._real), *self._instead} - self._missing)


class _Renamer(ast.NodeTransformer):
    """Puts the system's name in the place of `sys.platform`, and stand-ins in the place of modules."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_platform = isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("sys", "platform")
        return ast.copy_location(ast.Constant(SYSTEM), node) if is_platform else self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            if alias.name in self._names:
                alias.asname, alias.name = alias.asname or alias.name, PREFIX + alias.name
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if not node.level and node.module in self._names:
            node.module = PREFIX + node.module
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module of this package; what it compiles is not kept, because others load the same files unchanged."""

    names: frozenset[str] = frozenset()

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        code: types.CodeType = compile(_Renamer(self.names).visit(tree), path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of this package where the others would, and has them loaded by `_Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _PACKAGE:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        found = (
            finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec")
        )
        spec: importlib.machinery.ModuleSpec | None = next((one for one in found if one is not None), None)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            assert spec.origin is not None
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def _list_instead_on_windows() -> dict[str, dict[str, Any]]:
    """Return what Windows has in the place of something, by modules."""
    import ctypes
    import mmap
    import signal
    import tempfile
    import weakref

    def kill(pid: int, signum: int) -> None:
        if signum in (0, 1):  # events of a console
            raise OSError(f"os.kill({pid}, {signum}) sends Ctrl+C or Ctrl+Break to a group of processes")
        os.kill(pid, signal.SIGKILL)  # TerminateProcess

    def map_memory(fd: int, length: int, *, tagname: str | None = None, **options: Any) -> mmap.mmap:
        if tagname is None:
            return mmap.mmap(fd, length, **options)
        path = os.path.join(tempfile.gettempdir(), tagname)
        is_new = not os.path.exists(path)
        with open(path, "a+b") as file:
            file.truncate(length)
            memory = mmap.mmap(file.fileno(), length, **options)
        if is_new:  # gone with the last that has it open; here, with the first
            weakref.finalize(memory, os.unlink, path)
        return memory

    def load(name: str | None, *words: Any, **options: Any) -> ctypes.CDLL:
        return ctypes.CDLL(None if name == "ucrtbase" else name, *words, **options)

    def raise_signal(signum: int) -> None:
        os.kill(
            os.getpid(), signum
        )  # ends a sleep of the main thread, as C's `raise` does there from any thread

    return {
        "ctypes": {"CDLL": load},
        "mmap": {"mmap": map_memory},
        "os": {"O_BINARY": 0, "kill": kill, "name": "nt"},
        "signal": {
            "CTRL_BREAK_EVENT": 1,
            "CTRL_C_EVENT": 0,
            "SIGBREAK": 21,
            "raise_signal": raise_signal,
        },
    }


def _make_winapi() -> dict[str, types.ModuleType]:
    """Return the modules of Windows, with what this package calls of them."""
    import fcntl
    import struct
    import termios

    def peek(handle: int, size: int) -> tuple[int, int]:
        (waiting,) = struct.unpack("i", fcntl.ioctl(handle, termios.FIONREAD, b"\0\0\0\0"))
        return waiting, waiting

    winapi, msvcrt = types.ModuleType("_winapi"), types.ModuleType("msvcrt")
    winapi.PeekNamedPipe = peek  # type: ignore[attr-defined]
    msvcrt.get_osfhandle = int  # type: ignore[attr-defined]
    return {"_winapi": winapi, "msvcrt": msvcrt}


def install() -> None:
    """Make modules of this package, which are imported from now on, believe that they run on another system."""
    import multiprocessing.context

    missing = {name: frozenset(words.split()) for name, words in _NOT_ON_MACOS.items()}
    instead: dict[str, dict[str, Any]] = {}
    refused: frozenset[str] = frozenset()
    if SYSTEM == "win32":
        instead, refused = _list_instead_on_windows(), _NO_MODULES_OF_WINDOWS
        for name, words in _NOT_ON_WINDOWS.items():
            missing[name] = missing.get(name, frozenset()) | frozenset(words.split())
        sys.modules.update({PREFIX + name: module for name, module in _make_winapi().items()})
    names = ({*missing, *instead} - refused) | ({"_winapi", "msvcrt"} if SYSTEM == "win32" else set())
    for name in {*missing, *instead} - refused:
        sys.modules[PREFIX + name] = _StandIn(name, missing.get(name, frozenset()), instead.get(name, {}))
    _Loader.names = frozenset(names) | refused
    sys.meta_path.insert(0, _Finder())
    default: Any = multiprocessing.context._default_context  # what no caller has chosen yet
    default._default_context = multiprocessing.get_context("spawn")


def keep_interrupts_to_kernels() -> None:
    """Let an interrupt of a kernel reach it alone, as on Windows: here Jupyter sends one to its group of processes."""
    import multiprocessing.util
    import signal

    util: Any = multiprocessing.util
    spawn = util.spawnv_passfds

    def spawn_beside_group(*words: Any) -> int:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return int(spawn(*words))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    util.spawnv_passfds = spawn_beside_group
    if any("multiprocessing.spawn import spawn_main" in word for word in sys.orig_argv):
        os.setpgid(0, 0)
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which forgets one that came before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)


if SYSTEM:
    install()
if SYSTEM == "win32":
    keep_interrupts_to_kernels()
