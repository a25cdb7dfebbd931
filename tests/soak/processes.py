"""What the system says of the processes of a soak, which an environment variable marks, grandchildren too."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MARK = "NA_SOAK_MARK"
_PROC = Path("/proc")
_TRACKER, _AGENT, _AGENT_CODE = (
    b"multiprocessing.resource_tracker",
    b"accel-agent",
    b"launch.agent.server import main",
)
_STACK_SECONDS = 3.0


@dataclass(frozen=True)
class Found:
    """A living process.

    Attributes:
        pid: its id.
        parent: its parent's.
        state: as /proc has it: `R`, `S`, `T`.
        command: its command line.
        is_servant: whether it is the agent, a template of it, or multiprocessing's resource tracker.
    """

    pid: int
    parent: int
    state: str
    command: str
    is_servant: bool


def find_marked(mark: str) -> dict[int, Found]:
    """Return the living processes that have a mark in their environment, by id."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for name in os.listdir(_PROC):
        if name.isdecimal() and wanted in _read(int(name), "environ").split(b"\0"):
            process = read_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def read_process(pid: int) -> Found | None:
    """Return a process; None where it has ended, also where nobody has waited for it yet."""
    fields = _read_status(pid)
    if fields is None or fields[0] in "ZX":
        return None
    parent, line = int(fields[1]), _read(pid, "cmdline")
    # the agent has its name soon; its workers, and what they fork, have its command line too
    has_name = _read(pid, "comm").strip() == _AGENT
    is_agent = has_name or (_AGENT_CODE in line and _AGENT_CODE not in _read(parent, "cmdline"))
    command = "agent" if is_agent else line.replace(b"\0", b" ").decode("utf-8", "replace")[:120]
    return Found(pid, parent, fields[0], command, is_agent or _TRACKER in line)


def find_workers(kernel: int, mark: str) -> list[Found]:
    """Return a kernel's children and those of its agent and templates, apart from these and the resource tracker."""
    marked = find_marked(mark)
    servants = {p.pid for p in marked.values() if p.is_servant}
    return [
        p
        for p in marked.values()
        if p.pid != kernel and p.pid not in servants and p.parent in {kernel, *servants}
    ]


def find_agent(kernel: int, mark: str) -> Found | None:
    """Return the agent of a kernel."""
    found = (p for p in find_marked(mark).values() if p.command == "agent" and p.parent == kernel)
    return next(found, None)


def list_zombies(parent: int) -> list[int]:
    """Return the children of a process that have ended and that it has not waited for."""
    found = []
    for name in os.listdir(_PROC):
        fields = _read_status(int(name)) if name.isdecimal() else None
        if fields is not None and fields[0] == "Z" and int(fields[1]) == parent:
            found.append(int(name))
    return found


def count_descriptors(pid: int) -> Counter[str]:
    """Return how many descriptors of each kind a process has open: sockets, pipes, and files by name."""
    kinds: Counter[str] = Counter()
    folder = _PROC / str(pid) / "fd"
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            target = os.readlink(folder / name)
            kinds[target.partition(":[")[0] if target.startswith(("socket", "pipe")) else target] += 1
    return kinds


def count_threads(pid: int) -> int:
    """Return the number of threads of a process."""
    return len(os.listdir(_PROC / str(pid) / "task"))


def read_own_memory(pid: int) -> int:
    """Return the bytes of memory that a process shares with no other."""
    text = _read(pid, "smaps_rollup").decode()
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("Private_")]
    return sum(map(int, sizes)) * 1024


def describe(pids: Iterable[int], stacks: Path) -> str:
    """Return what processes are doing: by the system, and by the Python in them.

    Args:
        pids: of the processes.
        stacks: file to which they write their stacks on SIGUSR1.
    """
    texts = []
    for pid in pids:
        process = read_process(pid)
        if process is None:
            continue
        where = {name: _read(pid, name).decode("utf-8", "replace").strip() for name in ("wchan", "stack")}
        texts.append(
            f"-- process {pid}, child of {process.parent}, state {process.state}: {process.command}\n"
            f"waits in {where['wchan']}\n{where['stack']}\n{_ask_stacks(pid, stacks)}"
        )
    return "\n".join(texts)


def send(pid: int, signum: int) -> None:
    """Send a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def wait_until(is_true: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; return whether it holds."""
    end = time.monotonic() + seconds
    while not (holds := is_true()) and time.monotonic() < end:
        time.sleep(0.02)
    return holds


def _ask_stacks(pid: int, stacks: Path) -> str:
    status = dict(line.split(":", 1) for line in _read(pid, "status").decode().splitlines() if ":" in line)
    if (
        not int(status.get("SigCgt", "0"), 16) >> (signal.SIGUSR1 - 1) & 1
        or status["State"].strip()[0] == "T"
    ):
        return "(it shows no stacks)"
    before = stacks.stat().st_size
    send(pid, signal.SIGUSR1)
    wait_until(lambda: stacks.stat().st_size > before, _STACK_SECONDS)
    time.sleep(0.2)  # all of its threads
    return stacks.read_bytes()[before:].decode("utf-8", "replace")


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:  # it has ended
        return b""


def _read_status(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent and so on."""
    text = _read(pid, "stat").decode("utf-8", "replace")
    return text.rpartition(")")[2].split() if text else None
