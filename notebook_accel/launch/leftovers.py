"""What ended workers and killed runs leave is ended or removed: processes, shared memory, folders of sockets.

On Linux this needs the standard library alone: ranks that run a script end their children by it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from .. import owners
from . import process_table, signals

_OBEY_SECONDS: Final = 1.0  # from SIGTERM to SIGKILL
_KILLED_SECONDS: Final = 2.0
LONGEST_SECONDS: Final = _OBEY_SECONDS + _KILLED_SECONDS
"""For what workers have left running to be gone."""
_CHILDREN_SECONDS: Final = 0.5  # for children of a worker that ends, to obey, and once more to be killed
_LOOK_SECONDS: Final = 0.01
_TRACKER: Final = ".resource_tracker import main"  # in the command lines of multiprocessing's and of loky's

PREFIX: Final = "accel-"
"""How the name of a folder for sockets starts; the process that owns it follows."""
_OTHER: Final = "/tmp"  # where such a folder is if TMPDIR's path is too long
_LONGEST: Final = 107 if sys.platform == "linux" else 103  # bytes of a socket's path, sun_path in unix(7)
_SOCKET: Final = "/listener-12345678"  # as multiprocessing names one

_MEMORY: Final = Path("/dev/shm")
_HOSTS_IPC: Final = "ipc:[4026531839]"  # Linux gives the first space of each kind this number
_HOSTS_PIDS: Final = "pid:[4026531836]"


# -- processes


class Leftovers:
    """What the workers of a group have left running.

    A worker leads a session, and what it starts is in that session, in the worker's process group or another one. What
    has a session of its own is left alone: whoever detaches a program wants it to live on.

    SIGTERM comes first, and what is still there after a second is killed. Resource trackers (multiprocessing, loky) are
    not: they end by themselves when the others have, and remove shared memory then.
    """

    def __init__(self) -> None:
        self._due: dict[int, float] = {}  # when SIGKILL follows, by session
        self._seen: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._due)

    def end(self, leader: int) -> None:
        """Ask what a worker has left to end; never waits, and never raises.

        Args:
            leader: process id of the worker, which led a session. It has just ended: long afterwards another process
                may have the number.
        """
        found = process_table.list_session(leader)
        running = _pick_running(found)
        if leader in self._due or leader in running:  # a process that runs under the number is a stranger
            return
        self._seen |= found.keys()
        for group in {leader, *running.values()}:
            if signals.kill_group(group, signal.SIGTERM):
                self._due[leader] = time.monotonic() + _OBEY_SECONDS

    def look(self) -> None:
        """Kill what has not obeyed in time; never waits."""
        for leader, due in list(self._due.items()):
            found = process_table.list_session(leader)
            running = _pick_running(found)
            self._seen |= found.keys()
            late = time.monotonic() - due
            if late > _KILLED_SECONDS or not running or leader in running:
                del self._due[leader]
                self._remove_tensors()
            elif late > 0:
                _kill(running)

    def _remove_tensors(self) -> None:
        ended = {pid for pid in self._seen if _has_ended(pid)}
        remove_tensors(ended)
        self._seen -= ended

    def finish(self) -> None:
        """Wait until nothing is left: for some milliseconds where all obey, else for `LONGEST_SECONDS`."""
        while self._due:
            self.look()
            time.sleep(_LOOK_SECONDS if self._due else 0)


def kill_session(leader: int) -> None:
    """Kill all that is in the session of a worker.

    Args:
        leader: process id of the worker, which is still there.
    """
    killed: set[int] = set()
    while found := process_table.list_session(leader).keys() - killed:  # one may just have started another
        _kill(found)
        killed |= found


def list_children() -> list[int]:
    """Return what runs in the session that this process leads, but for trackers; Linux only."""
    if sys.platform != "linux":
        return []
    own = os.getpid()
    running = _pick_running(process_table.list_session(own))
    return [pid for pid in running if pid != own and not _is_tracker(pid)]


def end_children(earlier: Iterable[int] = ()) -> None:
    """Ask all that this process has started and that is in its session to end, and kill what does not obey.

    A worker does so as its last act: where its notebook is just being killed, nobody else would do it. Trackers end by
    themselves, after this process. Shared memory that the others had no time to give away is removed.

    Args:
        earlier: children that others may have ended since, as multiprocessing ends its daemons.
    """
    ended = set(earlier)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        sent: set[int] = set()
        deadline = time.monotonic() + _CHILDREN_SECONDS
        while (children := set(list_children())) and time.monotonic() < deadline:
            for pid in children - sent:
                signals.send(pid, signum)
            sent |= children
            time.sleep(_LOOK_SECONDS)
        ended |= sent
    remove_tensors({pid for pid in ended if _has_ended(pid)})


def _pick_running(found: dict[int, int]) -> dict[int, int]:
    return {pid: group for pid, group in found.items() if not _has_ended(pid)}


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        if not _is_tracker(pid):
            signals.kill(pid)


def _has_ended(pid: int) -> bool:
    return process_table.find_state(pid) in ("zombie", "gone")


def _is_tracker(pid: int) -> bool:
    return _TRACKER in process_table.read_command(pid)


def remove_tensors(pids: Collection[int]) -> None:
    """Remove the named tensors of processes that were ended; never raises. Linux only.

    torch makes a shared tensor under a name, and takes the name away at once. Where the maker is killed between the
    two, nothing else removes it.

    Args:
        pids: of the processes. None of them runs any more.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "linux" and pids and not _shares_memory_with_host():
            for pid in pids:
                for path in _MEMORY.glob(f"torch_{pid}_*"):
                    path.unlink(missing_ok=True)


def _shares_memory_with_host() -> bool:
    """Return whether processes that are not seen here have the same shared memory, as by `docker run --ipc=host`."""
    return os.readlink("/proc/self/ns/ipc") == _HOSTS_IPC and os.readlink("/proc/self/ns/pid") != _HOSTS_PIDS


# -- folders of sockets


def make_sockets_folder() -> str | None:
    """Let this process, and those that it starts, have multiprocessing's sockets in a folder; return its path.

    A process that is killed, such as a data loader worker, removes none. The folder goes with the process that has made
    it. On a full disk there is none: a worker that needs no socket runs without.
    """
    from multiprocessing import util  # here: a script may do without

    from . import children

    path = children.get_sockets_folder()
    if os.path.basename(path).startswith(PREFIX) and os.path.isdir(path):
        return path
    prefix = f"{PREFIX}{owners.describe_own()}-"
    with contextlib.suppress(OSError):
        _remove_abandoned_once()
        path = tempfile.mkdtemp(prefix=prefix, dir=find_folder(len(f"/{prefix}12345678{_SOCKET}")))
        children.use_sockets_folder(path)
        # as multiprocessing removes its own
        util.Finalize(None, shutil.rmtree, (path, True), exitpriority=-100)
        return path
    return None


def find_folder(length: int) -> str:
    """Return the folder for temporary files, or `/tmp` where its path is too long.

    Args:
        length: of what follows in the path of a socket.
    """
    asked = tempfile.gettempdir()
    return asked if len(os.fsencode(asked)) + length <= _LONGEST else _OTHER


def remove_abandoned() -> None:
    """Remove the folders of sockets whose owners have ended; never raises."""
    with contextlib.suppress(OSError):
        for folder in find():
            shutil.rmtree(folder, ignore_errors=True)


_remove_abandoned_once: Final = functools.cache(remove_abandoned)  # there may be many files beside them


def find() -> dict[Path, str]:
    """Return the folders of this user whose owners have ended, each with a clause about it; Linux only."""
    found: dict[Path, str] = {}
    for parent in {tempfile.gettempdir(), _OTHER}:
        for folder in sorted(Path(parent).glob(f"{PREFIX}*")):
            owner = owners.find_in(folder.name)
            with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
                seen = folder.lstat()
                is_own = stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.getuid()
                if is_own and owner is not None and owner.has_ended():
                    found[folder] = f"sockets of process {owner.pid}, which has ended"
    return found
