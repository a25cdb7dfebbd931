"""Signals: names and likely causes, and the end of process trees."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from . import process_table

CAUSES: Final = {
    "SIGKILL": "most often the operating system's out-of-memory killer: use less memory in each process, "
    "or fewer processes",
    "SIGTERM": "something outside the launch asked it to end",
    "SIGSEGV": "a crash in C code: the output above shows where Python was",
    "SIGBUS": "most often a full /dev/shm: use fewer data loader workers, or give it more room; else a file of weights "
    "that was cut off while a model used it",
    "SIGABRT": "C code gave up: its message is in the output above",
    "SIGFPE": "an arithmetic error in C code, an integer division by zero for example",
    "SIGILL": "a CPU instruction that this machine lacks: a library built for another processor",
    "SIGINT": "it was interrupted",
    "SIGHUP": "the terminal or session it belonged to ended",
    "SIGXCPU": "the limit on CPU time was reached (ulimit -t)",
    "SIGXFSZ": "the limit on file size was reached (ulimit -f)",
}
"""What most often sends each signal."""

_SIZES_DIFFER: Final = (
    "gloo gives up where ranks give tensors of different shapes to one collective, such as gather (see "
    "pad_across_processes), or are in different collectives, as where one rank has more batches; "
    "ACCELERATE_DEBUG_MODE=1 may name the ranks"
)
_LAST_WORDS: Final = {
    "Received data size doesn't match expected size": _SIZES_DIFFER,
    "op.preamble.length <= op.nbytes": _SIZES_DIFFER,  # of torch 2.8
}
"""What C code says when it gives up, and what that means."""


def name_of(signum: int) -> str:
    """Return the name of a signal, such as `SIGKILL`.

    Args:
        signum: number of the signal.

    Returns:
        Its name; `signal 42` for a number without a name.
    """
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def likely_cause(signum: int) -> str:
    """Return what most often sends a signal.

    Args:
        signum: number of the signal.

    Returns:
        Part of a sentence, from `CAUSES`; empty if there is none.
    """
    return CAUSES.get(name_of(signum), "")


def explain_abort(words: Sequence[str]) -> str:
    """Return why C code gave up, as a clause; empty where its last words are of an unknown kind.

    Args:
        words: the last lines of a process that was ended by SIGABRT.
    """
    return next(
        (cause for line in reversed(words) for mark, cause in _LAST_WORDS.items() if mark in line), ""
    )


STACK_SIGNAL: Final[int | None] = getattr(signal, "SIGRTMIN", 0) + 7 if hasattr(signal, "SIGRTMIN") else None
"""Makes a worker write its stack to stderr, even while C code holds the GIL. None on systems without it.

Programs that use real-time signals take the lowest numbers first.
"""


def is_caught(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal, as Linux tells; True where nobody tells.

    Args:
        pid: its process id.
        signum: number of the signal.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return not masks or bool(int(masks[0], 16) >> (signum - 1) & 1)


def describe_state(pid: int) -> str:
    """Return a clause about what the system says of a process, which was killed and is still there.

    Args:
        pid: process id.
    """
    state = process_table.find_state(pid)
    if state == "disk-sleep":
        return "the system waits for a disk, a network share or a device on its behalf"
    return f"the system says that it is {state}"


def send(pid: int, signum: int) -> None:
    """Send a signal to one process. If the process has ended, nothing happens.

    Args:
        pid: process id.
        signum: number of the signal.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError, OSError):
        os.kill(pid, signum)


def kill(pid: int) -> None:
    """Kill one process. If it has ended, nothing happens.

    Args:
        pid: process id.
    """
    send(pid, signal.SIGKILL)


def kill_group(leader: int, signum: int = signal.SIGKILL) -> bool:
    """Kill all processes of a group, even if its leader has ended.

    Args:
        leader: process id of the leader, which is the id of the group.
        signum: the signal.

    Returns:
        Whether there was such a group.
    """
    if leader <= 0:  # 0 is the group of this process
        return False
    try:
        os.killpg(leader, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True
