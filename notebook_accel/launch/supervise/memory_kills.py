"""Whether the system killed a process for want of memory: Linux counts such kills, by control group and in all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_OWN: Final = Path("/proc/self")
_WHOLE_SYSTEM: Final = Path("/proc/vmstat")
_COUNTS: Final = ("memory.events", "memory.oom_control")  # of version 2 of control groups, and of version 1
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_NO_LIMIT: Final = 1 << 60  # version 1 has a number where there is none
_ADVICE: Final = "use less memory in each process, or fewer processes"


class MemoryKills:
    """Counts, from now on, the processes that the system kills for want of memory.

    Args:
        own: where the system describes this process.
        whole_system: where it counts for all processes.
    """

    def __init__(self, own: Path = _OWN, whole_system: Path = _WHOLE_SYSTEM) -> None:
        self._group = find_group(own)
        self._counts = whole_system if self._group is None else _find_counts(self._group)
        self._before = _count(self._counts)

    def explain(self) -> str:
        """Return what this says of a process that SIGKILL has ended, as a clause; empty where nothing is known."""
        now = _count(self._counts)
        if now is None or self._before is None:
            return ""
        if (killed := now - self._before) <= 0:
            return (
                "not by the system's out-of-memory killer, which has killed nothing meanwhile, but by somebody or "
                "something else: a scheduler, a memory daemon such as systemd-oomd, or the end of a container"
            )
        limit = None if self._group is None else find_limit(self._group)
        where = "this machine" if self._group is None else "this control group"
        if limit is not None:
            where += f", which may use {limit / (1 << 30):.2f} GiB of memory"
        count = "a process" if killed == 1 else f"{killed} processes"
        return f"the system's out-of-memory killer has killed {count} of {where}: {_ADVICE}"


def find_group(own: Path) -> Path | None:
    """Return the folder of the control group that counts the memory of a process; None where none does.

    Args:
        own: where the system describes the process.
    """
    lines = list(filter(None, _read(own / "cgroup").split("\n")))
    mounts = list(filter(None, _read(own / "mountinfo").split("\n")))
    paths = {
        name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")
    }
    for line in mounts:
        place, _, kind = line.partition(" - ")
        root, mounted_at = place.split(" ")[3:5]
        system, _, options = kind.split(" ", 2)
        name = {"cgroup": "memory", "cgroup2": ""}.get(system)
        if name not in paths or (name and name not in options.split(",")):
            continue
        path = paths[name]
        below = (
            path[len(root) :] if path.startswith(root) else ""
        )  # a container sees its own part of the tree
        group = Path(mounted_at, below.strip("/"))
        if _count(_find_counts(group)) is not None:
            return group
    return None


def find_limit(group: Path) -> int | None:
    """Return how many bytes the processes of a control group may use; None where nothing limits them.

    Args:
        group: its folder; the limits of those around it hold too.
    """
    texts = (_read(folder / name).strip() for folder in (group, *group.parents) for name in _LIMITS)
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def _find_counts(group: Path) -> Path:
    return next((group / name for name in _COUNTS if (group / name).exists()), group / _COUNTS[0])


def _count(path: Path) -> int | None:
    found: Mapping[str, str] = dict(line.split(" ", 1) for line in _read(path).splitlines() if " " in line)
    text = found.get("oom_kill", "")
    return int(text) if text.isdecimal() else None


def _read(path: str | os.PathLike[str]) -> str:
    try:
        # a mount has the bytes that somebody gave it: the system escapes blanks, line ends and backslashes alone
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return ""
