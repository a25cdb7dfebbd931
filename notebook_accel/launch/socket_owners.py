"""Which process owns a folder of sockets, and what is left of owners that were killed; Linux only."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "pymp-"
"""How the names of such folders start, as multiprocessing has it."""
OTHERS: Final = ("/tmp", "/var/tmp", "/dev/shm")
"""Where they are besides, if the path of the folder for temporary files is too long for a socket."""
_MARK: Final = "owner"  # a file in such a folder
_LAST_SECONDS: Final = 2.0  # for processes of an owner to end after it
_LOOK_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that owns folders of sockets.

    Attributes:
        machine: what is the same for all processes that see each other: the boot, and the spaces of ids and sockets.
        pid: its process id.
        start: when it has started, in the system's own unit: a later process may get the same id.
    """

    machine: str
    pid: int
    start: int

    def has_ended(self) -> bool:
        """Return whether the process has ended, or is just ending: it has no descriptor any more."""
        try:
            state, start = _read_state(self.pid)
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
            return Owner(_describe_machine(), pid, _read_state(pid)[1])
    return None


def mark(folder: str) -> None:
    """Note in a folder that this process owns it, so that it can be removed if this process is killed."""
    if owner := find(os.getpid()):
        with contextlib.suppress(OSError):  # the disk may be full
            Path(folder, _MARK).write_text(f"{owner.machine} {owner.pid} {owner.start}")


def list_abandoned() -> dict[Path, int]:
    """Return the folders whose owner was killed, each with the owner's process id; none where that is not known.

    A folder of another user, container or boot is not listed, nor one in which is anything but sockets that no process
    has open.
    """
    here = find(os.getpid())
    return {
        folder: owner.pid
        for folder, owner in _list_owned()
        if here is not None and owner.machine == here.machine and owner.has_ended() and _is_unused(folder)
    }


def remove_abandoned() -> None:
    """Remove the folders whose owner was killed; never raises."""
    with contextlib.suppress(OSError):
        for folder in list_abandoned():
            shutil.rmtree(folder, ignore_errors=True)


def remove_folders_of(owner: Owner | None) -> None:
    """Remove the folders of an owner that has ended; never raises.

    Its workers may just be ending too: while they use a folder it is waited for them, but not for long.

    Args:
        owner: the process. Nothing is done where it goes on, or is not known.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    with contextlib.suppress(OSError):
        while owner is not None and owner.has_ended():
            left = [folder for folder, its_owner in _list_owned() if its_owner == owner]
            for folder in left:
                if _is_unused(folder):
                    shutil.rmtree(folder, ignore_errors=True)
            if not left or time.monotonic() >= deadline:
                return
            time.sleep(_LOOK_SECONDS)


def list_used() -> set[str]:
    """Return the paths of all sockets that processes have open.

    Raises:
        OSError: the system does not tell.
    """
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        return {line.rstrip("\n").split(maxsplit=7)[-1] for line in file}


def _list_owned() -> Iterator[tuple[Path, Owner]]:
    """Yield the folders of this user that have a mark, with their owners."""
    if sys.platform != "linux":
        return
    for parent in dict.fromkeys((tempfile.gettempdir(), *OTHERS)):
        for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
            with contextlib.suppress(OSError, ValueError):  # it has no such mark, or has just been removed
                seen = folder.lstat()
                if stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid():
                    machine, pid, start = Path(folder, _MARK).read_text().rsplit(maxsplit=2)
                    yield folder, Owner(machine, int(pid), int(start))


def _is_unused(folder: Path) -> bool:
    """Return whether nothing is in a folder but its mark and sockets that no process has open."""
    with contextlib.suppress(OSError):  # it has just been removed
        entries = [entry for entry in folder.iterdir() if entry.name != _MARK]
        are_sockets = all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries)
        return are_sockets and not list_used().intersection(map(str, entries))
    return False


def _describe_machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def _read_state(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state and when it has started; FileNotFoundError where there is none."""
    words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return words[0], int(words[19])
