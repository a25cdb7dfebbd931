"""What the system says of processes. On Linux it needs the standard library alone."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Final

from .. import owners

_STATES: Final = {
    "D": "disk-sleep",
    "T": "stopped",
    "t": "tracing-stop",
    "Z": "zombie",
    "X": "gone",
    "x": "gone",
}


def find_state(pid: int) -> str:
    """Return the state of a process.

    Args:
        pid: its process id.

    Returns:
        "disk-sleep", "stopped", "tracing-stop", "zombie" or "gone"; another word where it runs, or nobody can tell.
    """
    if sys.platform != "linux":
        import psutil

        try:
            return str(psutil.Process(pid).status())
        except psutil.NoSuchProcess:
            return "gone"
        except psutil.Error:
            return "running"
    try:
        return _STATES.get(owners.read_state(pid)[0], "running")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def list_session(leader: int) -> dict[int, int]:
    """Return the processes of a session, zombies too, each with its group; none where the system does not list them.

    Args:
        leader: process id of the one that made the session, which may have ended.
    """
    found: dict[int, int] = {}
    for pid in _list_pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                found[pid] = os.getpgid(pid)
    return found


def _list_pids() -> list[int]:
    if sys.platform == "linux":
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    import psutil

    return list(psutil.pids())


def read_command(pid: int) -> str:
    """Return the command line of a process, empty where the system does not tell."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return ""
    import psutil

    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""
