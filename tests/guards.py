"""What a test may not leave behind, one guard a kind; `tests/conftest.py` puts all of them around every test."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests import elsewhere, forker

_TORCHS = "_remote_module_non_scriptable.py"
LISTED_BY_THREAD = Path(f"/proc/self/task/{os.getpid()}/children")
"""Linux has such a file for each thread; some builds leave it out."""
GRACE_S = 30.0  # what is on its way out (a joined process, a closing socket) gets this long on a busy machine


class Guard(ABC):
    """Compares one kind of state before and after a test."""

    kind: str
    of_the_machine = False
    """Other processes change it, too: what came after the test's end is theirs."""

    @abstractmethod
    def snapshot(self) -> Any:
        """Return the state now."""

    @abstractmethod
    def leaks(self, before: Any) -> list[str]:
        """Return a sentence for each difference."""

    def restore(self, before: Any) -> None:  # noqa: B027 - not everything can be undone
        """Undo the differences, so that the next test starts clean and only the guilty one fails."""


class Environment(Guard):
    kind = "environment"
    # pytest's own, and what OpenMP's loaders (torch, scikit-learn) set when first imported
    IGNORED = frozenset({"PYTEST_CURRENT_TEST"}) | forker.SET_BY_LIBRARIES

    def snapshot(self) -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if name not in self.IGNORED}

    def leaks(self, before: dict[str, str]) -> list[str]:
        after = self.snapshot()
        found = [f"environment variable {n}={after[n]!r} was set" for n in sorted(after.keys() - before)]
        found += [f"environment variable {n} was removed" for n in sorted(before.keys() - after)]
        both = sorted(n for n in after.keys() & before if after[n] != before[n])
        return found + [f"environment variable {n}: {before[n]!r} became {after[n]!r}" for n in both]

    def restore(self, before: dict[str, str]) -> None:
        for name in self.snapshot().keys() - before:
            del os.environ[name]
        os.environ.update(before)


class ProcessGroup(Guard):
    kind = "process_group"

    def snapshot(self) -> bool:
        dist = sys.modules.get("torch.distributed")
        return dist is not None and dist.is_available() and dist.is_initialized()

    def leaks(self, before: bool) -> list[str]:
        if before or not self.snapshot():
            return []
        return ["a torch process group is still up: torch.distributed.destroy_process_group() is missing"]

    def restore(self, before: bool) -> None:
        if not before and self.snapshot():
            sys.modules["torch.distributed"].destroy_process_group()


class RuntimeSlot(Guard):
    kind = "runtime"

    def snapshot(self) -> object:
        runtime = sys.modules.get("notebook_accel.runtime")
        return None if runtime is None else runtime.current() or runtime.slot().waiting

    def leaks(self, before: object) -> list[str]:
        after = self.snapshot()
        if after is before or after is None:
            return []
        return [f"notebook_accel.runtime still holds {after!r}: runtime.reset() is missing"]

    def restore(self, before: object) -> None:
        runtime = sys.modules.get("notebook_accel.runtime")
        if before is None and runtime is not None:
            runtime.reset()


class Threads(Guard):
    kind = "threads"

    def snapshot(self) -> set[threading.Thread]:
        return set(threading.enumerate())

    def leaks(self, before: set[threading.Thread]) -> list[str]:
        # tqdm keeps one monitor thread for the life of the process, by design
        new = [t for t in self.snapshot() - before if t.is_alive() and type(t).__name__ != "TMonitor"]
        return [
            f"thread {t.name!r} is still running {getattr(t, '_target', None) or type(t).__name__}"
            for t in new
        ]


def list_descendants(pid: int) -> set[int]:
    """Return the ids of a process's children of any depth; it takes no look at other processes, which are many.

    Linux may leave some out while others of them end, so that it is read twice.
    """
    found = {child for _ in range(2) for child in _list_children(pid)}
    return found.union(*(list_descendants(child) for child in found))


def _list_children(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


AGENT = "accel-agent"


class Children(Guard):
    """Child processes of any depth; those that serve the next test too stay by design.

    They are the agent with its templates, the warm fork server and resource tracker of multiprocessing, and the process
    of `tests/forker.py`.
    """

    kind = "children"
    WARM = (
        "multiprocessing.forkserver import main",
        "multiprocessing.resource_tracker import main",
        "addr2line -C -f -e ",  # of torch, which finds lines of its C++ with it
        "-m tests.forking ",
        "notebook_accel.launch.agent.server import main",
    )

    def snapshot(self) -> set[psutil.Process]:
        if not LISTED_BY_THREAD.exists():
            return set(psutil.Process().children(recursive=True))
        found = set()
        for pid in list_descendants(os.getpid()):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid))
        return found

    def leaks(self, before: set[psutil.Process]) -> list[str]:
        found = []
        new = self.snapshot() - before
        # psutil looks at every process of the machine: only where there seems to be a leak
        for child in new and new.intersection(psutil.Process().children(recursive=True)):
            try:
                if self._stays(child):
                    continue
                command, status = " ".join(child.cmdline()), child.status()
            except psutil.Error:
                continue
            what = (
                "ended but nobody waited for it"
                if status == psutil.STATUS_ZOMBIE
                else f"runs {command[:100]!r}"
            )
            found.append(f"child process {child.pid} {what}")
        return found

    def restore(self, before: set[psutil.Process]) -> None:
        for child in self.snapshot() - before:
            try:
                if not self._stays(child):
                    child.kill()
                    child.wait(GRACE_S)
            except psutil.Error:
                continue

    def _stays(self, child: psutil.Process) -> bool:
        # a worker that a server forked has the server's command line, and the server as its parent
        parent = child.parent()
        mark = self._find_mark(child)
        is_worker = parent is not None and self._find_mark(parent) == mark
        return mark is not None and (not is_worker or child.name() == "accel-agent")

    def _find_mark(self, process: psutil.Process) -> str | None:
        line = " ".join(process.cmdline())
        return next((mark for mark in self.WARM if mark in line), None)


class SharedMemory(Guard):
    kind = "shared_memory"
    of_the_machine = True
    FOLDER = Path("/dev/shm")
    KEPT = "sem.mp-"  # where processes do not start by fork, semaphores have a name as long as they are kept
    MAKING = re.compile(r"sem\.[A-Za-z0-9]{6}")
    BYTES = 32

    def snapshot(self) -> set[str]:
        names = os.listdir(self.FOLDER) if self.FOLDER.is_dir() else []
        by_fork = not elsewhere.SYSTEM and sys.version_info < (3, 14)
        names = [name for name in names if not self.is_being_made(name)]
        return {name for name in names if by_fork or not name.startswith(self.KEPT)}

    @classmethod
    def is_being_made(cls, name: str) -> bool:
        """Return whether glibc was making a semaphore; where its maker is killed it stays, and nobody removes it."""
        with contextlib.suppress(OSError):
            return bool(cls.MAKING.fullmatch(name)) and (cls.FOLDER / name).stat().st_size == cls.BYTES
        return False

    def leaks(self, before: set[str]) -> list[str]:
        new = self.snapshot() - before
        foreign = self._mapped_elsewhere() if new else set()
        return [f"shared memory {self.FOLDER / name} was not unlinked" for name in sorted(new - foreign)]

    def restore(self, before: set[str]) -> None:
        for name in self.snapshot() - before - self._mapped_elsewhere():
            (self.FOLDER / name).unlink(missing_ok=True)

    def _mapped_elsewhere(self) -> set[str]:
        """Return the entries that a process outside this test run has mapped."""
        family = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
        names: set[str] = set()
        for process in psutil.process_iter():
            if process.pid in family:
                continue
            try:
                maps = process.memory_maps(grouped=True)
            except (psutil.Error, OSError):
                continue
            names |= {
                Path(m.path.removesuffix(" (deleted)")).name for m in maps if m.path.startswith("/dev/shm/")
            }
        return names


class Descriptors(Guard):
    """Open file descriptors; those that lead to warm processes stay by design."""

    kind = "descriptors"
    FOLDER = Path("/proc/self/fd")
    # opened once and kept: the random device by torch, null by many, the CPU tables by OpenMP and psutil
    KEPT = ("/dev/null", "/dev/urandom", "/dev/random", "/proc/", "/sys/")
    # Libraries hold a descriptor or two from first use on (an event loop's wake-up pair, a log file, a font
    # cache). A leak that matters repeats: a launch costs at least three a worker.
    TOLERANCE = 2

    def snapshot(self) -> set[tuple[int, str]]:
        opened = set()
        for name in os.listdir(self.FOLDER) if self.FOLDER.is_dir() else ():
            try:
                opened.add((int(name), os.readlink(self.FOLDER / name)))
            except OSError:  # the descriptor of the listing itself
                continue
        return opened

    def leaks(self, before: set[tuple[int, str]]) -> list[str]:
        new = self._new(before)
        if len(new) > self.TOLERANCE:
            gc.collect()  # an object in a cycle holds its descriptor until then
            kept = set(_list_pipes("addr2line"))
            new = [(fd, to) for fd, to in self._new(before) if to not in kept]
        if len(new) <= self.TOLERANCE:
            return []
        listed = ", ".join(f"{fd} -> {target}" for fd, target in new)
        return [f"{len(new)} file descriptors are still open: {listed}"]

    def _new(self, before: set[tuple[int, str]]) -> list[tuple[int, str]]:
        warm = self._warm()
        new = self.snapshot() - before
        return sorted((fd, to) for fd, to in new if fd not in warm and not to.startswith(self.KEPT))

    @staticmethod
    def _warm() -> set[int]:
        """Return the descriptors of this process's agent, fork server, resource tracker and forker."""
        found = {descriptor for one in forker.CURRENT for descriptor in one.descriptors}
        runtime = sys.modules.get("notebook_accel.runtime")
        for agent in [] if runtime is None else runtime.agents():
            found |= {*agent.filenos(), agent._log}
        for module, slot, fields in (
            ("multiprocessing.forkserver", "_forkserver", ("_forkserver_alive_fd",)),
            ("multiprocessing.resource_tracker", "_resource_tracker", ("_fd",)),
        ):
            owner = getattr(sys.modules.get(module), slot, None)
            found |= {fd for name in fields if isinstance(fd := getattr(owner, name, None), int)}
        return found


def _list_pipes(name: str) -> Iterator[str]:
    """Yield the pipes of child processes of a name, as the system calls them."""
    for child in psutil.Process().children():
        with contextlib.suppress(OSError, psutil.Error):
            if child.name() == name:
                folder = Path(f"/proc/{child.pid}/fd")
                yield from (os.readlink(folder / fd) for fd in os.listdir(folder))


class TempFiles(Guard):
    """Entries of the temp folder, which the test session has for itself."""

    kind = "temp_files"
    # multiprocessing keeps one folder for its sockets, and so does this package: the next run removes that of a kernel
    # that was killed; matplotlib and torch's compiler keep each a cache
    KEPT = ("pymp-", "accel-", "matplotlib-", "torchinductor_")

    def snapshot(self) -> set[str]:
        return set(os.listdir(tempfile.gettempdir()))

    def leaks(self, before: set[str]) -> list[str]:
        new = sorted(name for name in self.snapshot() - before if not name.startswith(self.KEPT))
        return [
            f"{name} was left in the temp folder"
            for name in new
            if not (_is_of_torch(name) or _is_trial_of_tempfile(name))
        ]


def _is_of_torch(name: str) -> bool:
    """Return whether an entry of the temp folder is the one that torch up to 2.9 makes when it is imported.

    The process removes it at its end. This process and the fork server of the ranks go on until the session ends.
    """
    try:
        entries = set(os.listdir(os.path.join(tempfile.gettempdir(), name)))
    except OSError:  # no folder, or gone meanwhile
        return False
    return entries - {"__pycache__"} == {_TORCHS}


def _is_trial_of_tempfile(name: str) -> bool:
    """Return whether a file is the one by which `tempfile.gettempdir` tries a folder, in a process that was killed.

    Its name is eight random characters. Ray kills processes that it has just started.
    """
    path = Path(tempfile.gettempdir(), name)
    try:
        return len(name) == 8 and path.is_file() and path.read_bytes() in (b"", b"blat")
    except OSError:  # gone meanwhile
        return True


class Signals(Guard):
    kind = "signals"
    # the timer of pytest-timeout owns SIGALRM
    WATCHED = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGCHLD,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGPIPE,
    )

    def snapshot(self) -> dict[signal.Signals, Any]:
        return {number: signal.getsignal(number) for number in self.WATCHED}

    def leaks(self, before: dict[signal.Signals, Any]) -> list[str]:
        after = self.snapshot()
        return [
            f"handler of {number.name}: {before[number]!r} became {after[number]!r}"
            for number in self.WATCHED
            if after[number] != before[number]
        ]

    def restore(self, before: dict[signal.Signals, Any]) -> None:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)


class WorkingFolder(Guard):
    kind = "cwd"

    def snapshot(self) -> str:
        return os.getcwd()

    def leaks(self, before: str) -> list[str]:
        try:
            after = self.snapshot()
        except FileNotFoundError:
            after = "a removed folder"
        return [] if after == before else [f"working folder {before} became {after}"]

    def restore(self, before: str) -> None:
        os.chdir(before)


class TorchSettings(Guard):
    kind = "torch"

    def snapshot(self) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "get_default_dtype"):
            return {}
        return {
            "default dtype": torch.get_default_dtype(),
            "number of threads": torch.get_num_threads(),
            "grad mode": torch.is_grad_enabled(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        }

    def leaks(self, before: dict[str, Any]) -> list[str]:
        after = self.snapshot()
        return [
            f"torch's {name}: {before[name]} became {after[name]}"
            for name in before
            if after[name] != before[name]
        ]

    def restore(self, before: dict[str, Any]) -> None:
        torch: Any = sys.modules.get("torch")
        if before:
            torch.set_default_dtype(before["default dtype"])
            torch.set_grad_enabled(before["grad mode"])
            torch.use_deterministic_algorithms(before["deterministic algorithms"])
            if torch.get_num_threads() != before["number of threads"]:
                torch.set_num_threads(before["number of threads"])


# In the order in which they look and clean up: what holds other things goes first.
GUARDS: tuple[Guard, ...] = (
    RuntimeSlot(),
    ProcessGroup(),
    Children(),
    Threads(),
    SharedMemory(),
    Descriptors(),
    TempFiles(),
    Environment(),
    Signals(),
    WorkingFolder(),
    TorchSettings(),
)
KINDS = tuple(guard.kind for guard in GUARDS)


def find_leaks(before: dict[str, Any], allowed: Iterable[str] = ()) -> list[str]:
    """Return what differs from `before` after the grace period, as sentences, and clean it up."""
    watched = [guard for guard in GUARDS if guard.kind not in frozenset(allowed)]
    found: list[str] = []
    for guard in watched:
        deadline = time.monotonic() + GRACE_S
        leaks = guard.leaks(before[guard.kind])
        while leaks and time.monotonic() < deadline:
            if not isinstance(guard, (Children, Threads, SharedMemory, Descriptors, TempFiles)):
                break  # nothing else changes by waiting
            time.sleep(0.02)
            now = guard.leaks(before[guard.kind])
            leaks = [leak for leak in now if leak in leaks] if guard.of_the_machine else now
        if leaks:
            found += leaks
            guard.restore(before[guard.kind])
    return found


def take_snapshots() -> dict[str, Any]:
    """Return the state of every guard now, by kind."""
    return {guard.kind: guard.snapshot() for guard in GUARDS}
