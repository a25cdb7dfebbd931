"""What killed runs have left on this machine: nobody uses it, and nothing else removes it."""

from __future__ import annotations

import contextlib
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..launch import shared_memory, socket_owners
from ..launch.leftovers import find_semaphores, list_used


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder of a run that was killed.

    Attributes:
        path: of it.
        text: what it is and of whom.
    """

    path: Path
    text: str

    def remove(self) -> None:
        """Remove it; OSError where the system refuses."""
        if self.path.is_dir():
            shutil.rmtree(self.path)
        else:
            self.path.unlink(missing_ok=True)


def find() -> list[Leftover]:
    """Return what killed runs have left; Linux only. What may be in use is not among it."""
    if sys.platform != "linux":
        return []
    sockets = [
        Leftover(path, f"sockets of process {owner}, which has ended")
        for path, owner in socket_owners.list_abandoned().items()
    ]
    return [*sockets, *_find_tensors(), *_find_semaphores()]


def _find_tensors() -> list[Leftover]:
    """Return torch's shared memory of processes that have ended, which no process has mapped or open."""
    with contextlib.suppress(OSError):
        old = {
            entry: pid for entry, pid in shared_memory.list_tensors().items() if not psutil.pid_exists(pid)
        }
        used = list_used() if old else set()
        return [
            Leftover(entry, f"shared memory of process {pid}, which has ended")
            for entry, pid in sorted(old.items())
            if str(entry) not in used
        ]
    return []


def _find_semaphores() -> list[Leftover]:
    """Return semaphores whose makers were killed meanwhile."""
    with contextlib.suppress(OSError):
        text = "a semaphore that a killed process was making"
        return [Leftover(path, text) for path in find_semaphores()]
    return []
