"""Which process owns what lies on a disk, and whether it has ended; Linux only."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PATTERN: Final = r"[0-9a-f]{8}-\d+-\d+"
"""How the name of a file or folder carries its owner."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns files or folders.

    Attributes:
        machine: the same for all processes that see each other: of the boot, and the spaces of ids and sockets.
        pid: its process id.
        start: when it has started, in the system's own unit: a later process may get the same id.
    """

    machine: str
    pid: int
    start: int

    def has_ended(self) -> bool:
        """Return whether the process has ended, or is just ending: it has no descriptor any more."""
        try:
            state, start = read_state(self.pid)
            return start != self.start or state in "ZX" or not os.listdir(f"/proc/{self.pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # the system does not tell
            return False


def find(pid: int) -> Owner | None:
    """Return a process as an owner, None where the system does not tell.

    Args:
        pid: its process id.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, ValueError, IndexError):
            return Owner(_describe_machine(), pid, read_state(pid)[1])
    return None


def describe_own() -> str:
    """Return this process as the name of a file or folder carries it; of nobody where the system does not tell."""
    own = find(os.getpid())
    return "00000000-0-0" if own is None else f"{own.machine}-{own.pid}-{own.start}"


def find_in(name: str) -> Owner | None:
    """Return the owner that a name of a file or folder carries; None without one, or if it is of another machine."""
    here, found = find(os.getpid()), re.findall(PATTERN, name)
    if here is None or not found:
        return None
    machine, pid, start = found[-1].split("-")
    return Owner(machine, int(pid), int(start)) if machine == here.machine else None


def read_state(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state, see man 5 proc, and when it has started.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process.
    """
    words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return words[0], int(words[19])


def _describe_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    return f"{zlib.crc32(machine.encode()):08x}"
