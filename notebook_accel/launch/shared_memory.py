"""The shared memory of processes that were ended: what nobody can have, and nothing else removes.

torch makes a shared tensor under a name, which has its maker's process id, and takes the name away at once. A loader's
worker that is ended between the two leaves a file in memory that stays until the machine is started again. So does a
process that is killed while the C library makes a semaphore: that has a name of its own first.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

FOLDER: Final = Path("/dev/shm")
_TENSOR: Final = re.compile(r"torch_(\d+)_\d+_\d+")
_SEMAPHORE: Final = re.compile(
    r"sem\.[A-Za-z0-9]{6}"
)  # of glibc; one that is made is called sem.mp-... by Python
_SEMAPHORE_BYTES: Final = 32
_HOSTS_IPC: Final = "ipc:[4026531839]"  # Linux gives the first space of each kind this number
_HOSTS_PIDS: Final = "pid:[4026531836]"


def list_tensors() -> dict[Path, int]:
    """Return the named tensors of this user, with the process ids of their makers; Linux only.

    There are none where processes that are not seen here share the memory: their numbers say nothing.

    Raises:
        OSError: the system does not tell.
    """
    return {entry: int(name[1]) for entry, name, _ in _list_own(_TENSOR)}


def list_semaphores() -> list[Path]:
    """Return the semaphores of this user that are being made, or whose makers were killed meanwhile; Linux only.

    A maker has its semaphore open. There are none where processes that are not seen here share the memory.

    Raises:
        OSError: the system does not tell.
    """
    return [entry for entry, _, size in _list_own(_SEMAPHORE) if size == _SEMAPHORE_BYTES]


def _list_own(names: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str], int]]:
    """Yield the files of this user with such names, and their sizes."""
    if sys.platform != "linux":
        return
    if os.readlink("/proc/self/ns/ipc") == _HOSTS_IPC and os.readlink("/proc/self/ns/pid") != _HOSTS_PIDS:
        return
    for entry in FOLDER.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            if (name := names.fullmatch(entry.name)) and (seen := entry.lstat()).st_uid == os.getuid():
                yield entry, name, seen.st_size


def remove_tensors(pids: Collection[int]) -> None:
    """Remove the named tensors of processes that were ended; never raises.

    Args:
        pids: of the processes. None of them runs any more.
    """
    if pids:
        with contextlib.suppress(OSError):
            for entry, pid in list_tensors().items():
                if pid in pids:
                    entry.unlink(missing_ok=True)
