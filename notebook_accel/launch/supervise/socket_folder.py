"""Where processes of this machine put their sockets: the system limits the length of a socket's path."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import process, util
from pathlib import Path
from typing import Any, Final

from ...errors import LaunchError

_LONGEST: Final = 107 if sys.platform == "linux" else 103  # bytes of a path, sun_path in unix(7)
_LISTENER: Final = len("/pymp-12345678/listener-12345678")
_OTHERS: Final = ("/tmp", "/var/tmp", "/dev/shm")
_OWNER: Final = "owner"  # a file in such a folder
_KEY: Final = "tempdir"  # where multiprocessing keeps its folder, also for the processes that this one starts


def use_short_folder() -> None:
    """Let multiprocessing's sockets lie in another folder where the path of temporary files is too long for them.

    The fork server has such a socket, and so have tensors that data loader workers send. The processes that this one
    starts inherit the folder.

    Raises:
        LaunchError: there is no folder with a shorter path.
    """
    if sys.platform == "win32":
        return
    settings: dict[str, Any] = vars(process.current_process())["_config"]
    present = settings.get(_KEY)
    if present is not None and _has_room(os.path.dirname(present), _LISTENER):
        return
    parent = find_folder(_LISTENER)
    if present is None and parent == tempfile.gettempdir():
        return
    folder = tempfile.mkdtemp(prefix="pymp-", dir=parent)
    _mark(folder)
    util.Finalize(  # as multiprocessing removes its own
        None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100
    )
    settings[_KEY] = folder


def make_own() -> None:
    """Let multiprocessing make its folder now, where it has none, with a mark that this process owns it."""
    if vars(process.current_process())["_config"].get(_KEY) is None:
        _mark(util.get_temp_dir())


class WorkersFolder:
    """Where workers and their processes have multiprocessing's sockets: those that are killed remove none."""

    def __init__(self) -> None:
        self._path: str | None = None

    def assign(self, worker: Any) -> None:
        """Let a worker use the folder, with all processes that it starts.

        On a full disk there is none: a worker that needs no socket runs without.

        Args:
            worker: a process of multiprocessing, not started yet.

        Raises:
            LaunchError: there is no folder with a path that is short enough.
        """
        if sys.platform == "win32":
            return
        if self._path is None:
            try:
                self._path = tempfile.mkdtemp(prefix="pymp-", dir=find_folder(_LISTENER))
            except OSError:
                return
            _mark(self._path)
        vars(worker)["_config"][_KEY] = self._path

    def remove(self) -> None:
        """Remove the folder, once the workers have ended."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None


@contextlib.contextmanager
def keep_tidy() -> Iterator[None]:
    """Let processes that this one starts have their sockets in its folder, and remove those of killed ones.

    Data loader workers have such sockets. Which are in use is known on Linux only: elsewhere they stay until this
    process ends, or longer.
    """
    if sys.platform != "linux":
        yield
        return
    with contextlib.suppress(OSError, LaunchError):
        use_short_folder()
        make_own()
    try:
        yield
    finally:
        _remove_unused(vars(process.current_process())["_config"].get(_KEY))


def _remove_unused(folder: str | None) -> None:
    """Remove sockets that no process has open: asking them would be a request to a fork server."""
    with contextlib.suppress(OSError):
        paths = {str(path) for path in Path(folder or "").glob("listener-*")} if folder else set()
        if not paths:
            return
        for path in paths - _list_used():
            os.unlink(path)


def _list_used() -> set[str]:
    """Return the paths of all sockets that processes have open; Linux only."""
    with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as file:
        return {line.rstrip("\n").split(maxsplit=7)[-1] for line in file}


def _mark(folder: str) -> None:
    """Note in a folder which process owns it, so that it can be removed if that process is killed; Linux only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the disk may be full
            Path(folder, _OWNER).write_text(f"{_describe_machine()} {os.getpid()} {_read_start(os.getpid())}")


def list_abandoned() -> dict[Path, int]:
    """Return the folders whose owner was killed, each with the owner's process id; none where that is not known.

    A folder of another user, container or boot is not listed, nor one in which is anything but sockets that no process
    has open.
    """
    found: dict[Path, int] = {}
    if sys.platform != "linux":
        return found
    for parent in dict.fromkeys((tempfile.gettempdir(), *_OTHERS)):
        for folder in sorted(Path(parent).glob("pymp-*")):
            with contextlib.suppress(OSError, ValueError):  # it has no such mark, or has just been removed
                if (owner := _find_dead_owner(folder)) is not None:
                    found[folder] = owner
    return found


def _find_dead_owner(folder: Path) -> int | None:
    """Return the process id of a folder's owner if the owner has ended and nothing in the folder is in use."""
    if sys.platform == "win32":  # it has no user ids
        return None
    seen = folder.lstat()
    if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid():
        return None
    machine, pid, start = Path(folder, _OWNER).read_text().rsplit(maxsplit=2)
    entries = [entry for entry in folder.iterdir() if entry.name != _OWNER]
    if machine != _describe_machine() or not all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries):
        return None
    if _list_used().intersection(map(str, entries)):
        return None
    try:
        runs = _read_start(int(pid)) == int(start)
    except FileNotFoundError:
        runs = False
    return None if runs else int(pid)


def _describe_machine() -> str:
    """Return what is the same for all processes that see each other: the boot, and the spaces of ids and sockets."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def _read_start(pid: int) -> int:
    """Return when a process has started, in the system's own unit; FileNotFoundError where there is none."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def find_folder(length: int) -> str:
    """Return the folder for temporary files, or another one where its path is too long.

    Args:
        length: of what follows in the path of a socket.

    Raises:
        LaunchError: there is no folder with a path that is short enough.
    """
    asked = tempfile.gettempdir()
    for folder in (asked, *_OTHERS):
        if _has_room(folder, length) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise LaunchError(
        f"TMPDIR is {asked}, {len(os.fsencode(asked))} bytes long, and the path of a socket in it would be longer than "
        f"the {_LONGEST} bytes that the system allows; nothing can be written in {', '.join(_OTHERS)}: set TMPDIR to a "
        f"folder whose path has {_LONGEST - length} bytes at most"
    )


def _has_room(folder: str, length: int) -> bool:
    return len(os.fsencode(folder)) + length <= _LONGEST
