"""What ended workers have left running: it is asked to end, and killed where it does not.

A worker leads a session, and what it starts is in that session, be it in the worker's process group or in another one.
What was started in a session of its own is left alone: whoever detaches a program wants it to live on.

The system gives the number of a session or group to no other process while one of it is there, if only as a zombie. So
a process that runs under the number of a worker that has ended is a stranger, and nothing of the worker is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from . import signals
from .shared_memory import list_semaphores, remove_tensors
from .trackers import is_tracker

_OBEY_SECONDS: Final = 1.0  # from SIGTERM to SIGKILL
_GONE_SECONDS: Final = 5.0  # for trackers after the others
_KILLED_SECONDS: Final = 1.0
LONGEST_SECONDS: Final = _OBEY_SECONDS + _GONE_SECONDS + _KILLED_SECONDS
"""For what workers have left running to be gone."""
_LOOK_SECONDS: Final = 0.01
_SAME_SESSION_SECONDS: Final = 1.0  # between two looks; after longer, another session may have the number


class _Left:
    """The session of a worker that has just ended.

    Args:
        leader: the worker's process id, which is the number of the session, and of the worker's process group.
    """

    def __init__(self, leader: int) -> None:
        self._leader = leader
        self._looked = time.monotonic()
        self._due = self._looked + _OBEY_SECONDS
        self._trackers_due: float | None = None
        self._found: set[psutil.Process] = set()
        self._ever: set[psutil.Process] = set()
        self._asked: set[int] = set()  # groups
        self._running: dict[psutil.Process, int] | None = {}

    def is_alive(self) -> bool:
        """Return whether anything is left that runs, once all of it was asked to end."""
        now = time.monotonic()
        is_late, self._looked = now - self._looked > _SAME_SESSION_SECONDS, now
        found = _list_session(self._leader)
        if found is None:  # then groups are all that can be asked for
            self._running = None
            self._ask_groups({self._leader})
            return not is_late and signals.kill_group(self._leader, 0)
        self._running = {process: group for process, group in found.items() if _is_running(process)}
        if any(process.pid == self._leader for process in self._running):
            return False
        if is_late and not self._found.intersection(found):
            return False
        new, self._found = self._running.keys() - self._found, set(found)
        self._ever |= self._found
        for process in new:
            if self._running[process] in self._asked:
                _send(process, signal.SIGTERM)
        self._ask_groups({self._leader, *self._running.values()})
        if not found:  # what starts the next process and ends, again and again, may not be found
            return signals.kill_group(self._leader, 0)
        if not self._running:
            signals.kill_group(self._leader)  # the same, beside processes that nobody waits for
        return bool(self._running)

    def _ask_groups(self, groups: set[int]) -> None:
        """Ask groups to end, each once: all of a group at once, so that none starts another process meanwhile."""
        for group in groups - self._asked:
            signals.kill_group(group, signal.SIGTERM)
        self._asked |= groups

    def remove_memory(self) -> None:
        """Remove the shared memory that processes had no time to give away; of those that have ended."""
        remove_tensors({process.pid for process in self._ever if not _is_running(process)})

    def kill(self) -> bool:
        """Kill what has not obeyed in time, those that remove shared memory last; return whether to go on looking."""
        now = time.monotonic()
        if now < self._due:
            return True
        if self._trackers_due is None:
            self._trackers_due = now + _GONE_SECONDS
        running = self._running or {}
        trackers = {process for process in running if _may_be_tracker(process)}
        if now < self._trackers_due and (trackers or self._running is None):
            for process in running.keys() - trackers:
                _send(process, signals.KILL)
            return True
        _kill_groups(self._leader, running)
        return bool(running) and now < self._trackers_due + _KILLED_SECONDS


class Leftovers:
    """What the workers of a group have left running.

    First it is asked to end by SIGTERM. What removes forgotten shared memory ignores that, and ends by itself when the
    others have. What is still there after a second is killed.
    """

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def end(self, leader: int) -> None:
        """Ask what a worker has left to end; never waits, and never raises.

        Args:
            leader: process id of the worker, which led a session. It has just ended: long afterwards another process
                may have the number.
        """
        left = _Left(leader)
        if leader not in self._left and left.is_alive():
            self._left[leader] = left

    def look(self) -> None:
        """Kill what has not obeyed in time; never waits."""
        for leader, left in list(self._left.items()):
            if not left.is_alive() or not left.kill():
                del self._left[leader]
                left.remove_memory()

    def finish(self) -> None:
        """Wait until nothing is left: for some milliseconds where all obey, else for `LONGEST_SECONDS`."""
        while self._left:
            self.look()
            time.sleep(_LOOK_SECONDS if self._left else 0)
        remove_semaphores()


def kill_session(leader: int) -> None:
    """Kill all that is in the session of a worker.

    Args:
        leader: process id of the worker, which is still there.
    """
    _kill_groups(leader, _list_session(leader) or {})


def _kill_groups(leader: int, members: dict[psutil.Process, int]) -> None:
    for group in {
        leader,
        *members.values(),
    }:  # at once: what only starts the next process and ends cannot escape
        signals.kill_group(group)


def _list_session(leader: int) -> dict[psutil.Process, int] | None:
    """Return the processes of a session, zombies too, with their groups; None where the system does not list them."""
    found: dict[psutil.Process, int] = {}
    if sys.platform == "win32":  # it has no sessions
        return found
    try:
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
                if os.getsid(pid) == leader:
                    found[psutil.Process(pid)] = os.getpgid(pid)
    except (OSError, psutil.Error):  # there is no free descriptor
        return None
    return found


def remove_semaphores() -> None:
    """Remove semaphores whose makers were killed meanwhile; never raises."""
    with contextlib.suppress(OSError):
        for path in find_semaphores():
            path.unlink(missing_ok=True)


def find_semaphores() -> list[Path]:
    """Return semaphores whose makers were killed meanwhile: no process has them open.

    Raises:
        OSError: the system does not tell.
    """
    found = list_semaphores()
    used = list_used() if found else set()
    return sorted(path for path in found if str(path) not in used)


def list_used() -> set[str]:
    """Return the files that processes of this user have mapped or open."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {one.path for one in process.memory_maps(grouped=True)}
            used |= {one.path for one in process.open_files()}
    return used


def _is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended, as far as the system says."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError):
        return True


def _may_be_tracker(process: psutil.Process) -> bool:
    try:
        return is_tracker(process.cmdline())
    except psutil.Error:
        return False
    except OSError:  # there is no free descriptor
        return True


def _send(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(signum)
