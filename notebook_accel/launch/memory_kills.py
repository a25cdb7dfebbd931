"""Was a process OOM-killed? And how much memory is free before that may happen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

_COUNTS: Final = Path("/proc/vmstat")
_GROUP: Final = Path("/proc/self/cgroup")
_GROUPS: Final = Path("/sys/fs/cgroup")
# of control groups of version 2, and of version 1
_EVENTS: Final = ("memory.events", "memory.oom_control")
_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
_USED: Final = ("memory.current", "memory.usage_in_bytes")
_NO_LIMIT: Final = 1 << 60  # version 1 has a number where there is none
_ADVICE: Final = "use less memory in each process, or fewer processes"


class MemoryKills:
    """Counts, from now on, the processes that Linux kills for want of memory: of this control group, or machine."""

    def __init__(self) -> None:
        self._groups = _list_groups()
        places = [folder / name for folder in self._groups for name in _EVENTS]
        self._counts = next((place for place in places if _count(place) is not None), _COUNTS)
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
        where = "this machine" if self._counts == _COUNTS else "this control group"
        limits = [limit for folder in self._groups if (limit := _read_number(folder, _LIMITS)) is not None]
        if self._counts != _COUNTS and (least := min(limits, default=_NO_LIMIT)) < _NO_LIMIT:
            where += f", which may use {least / (1 << 30):.2f} GiB of memory"
        count = "a process" if killed == 1 else f"{killed} processes"
        return f"the system's out-of-memory killer has killed {count} of {where}: {_ADVICE}"


def find_free_memory() -> int:
    """Return how many bytes this process may still use: what the machine has, or what its control groups leave."""
    free = int(psutil.virtual_memory().available)
    for folder in _list_groups():
        limit, used = _read_number(folder, _LIMITS), _read_number(folder, _USED)
        if limit is not None and used is not None:
            table = _read(folder / "memory.stat")
            cached = _find(table, "total_inactive_file") or _find(table, "inactive_file") or 0
            free = min(free, limit - used + cached)
    return free


def _list_groups() -> list[Path]:
    """Return the folders of the control groups that count this process's memory, the innermost first.

    In a container, whose groups begin elsewhere, inner ones may be missing: the outer ones hold.
    """
    found: list[Path] = []
    for line in _read(_GROUP).splitlines():
        _, kind, path = line.split(":", 2)
        if kind in ("", "memory"):
            group = _GROUPS / kind / path.lstrip("/")
            found += [folder for folder in (group, *group.parents) if folder.is_relative_to(_GROUPS)]
    return found


def _count(table: Path) -> int | None:
    return _find(_read(table), "oom_kill")


def _find(table: str, name: str) -> int | None:
    return next((int(row.split()[1]) for row in table.splitlines() if row.startswith(f"{name} ")), None)


def _read_number(folder: Path, names: Sequence[str]) -> int | None:
    return next((int(text) for name in names if (text := _read(folder / name).strip()).isdecimal()), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
