"""What ended workers have left running: it is asked to end, and killed where it does not."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

import psutil

from . import signals

_OBEY_SECONDS: Final = 1.0  # from SIGTERM to SIGKILL
_GONE_SECONDS: Final = 1.0  # for what is killed, and for trackers after the others
_LOOK_SECONDS: Final = 0.01
_SAME_GROUP_SECONDS: Final = 1.0  # between two looks; after longer, the number may be another group's
_TRACKER: Final = "multiprocessing.resource_tracker"


class _Left:
    """The process group of a worker, and those that it started in other groups.

    Args:
        leader: the worker's process id, which is the id of the group.
        below: those in other groups.
    """

    def __init__(self, leader: int, below: Iterable[psutil.Process]) -> None:
        self._leader = leader
        self._looked = time.monotonic()
        self._due = self._looked + _OBEY_SECONDS
        self._spares_trackers = True
        self._known: set[psutil.Process] = set(_list_group(leader))
        signals.kill_group(leader, signal.SIGTERM)  # all at once: none starts another one meanwhile
        self.ask(below)

    def ask(self, processes: Iterable[psutil.Process]) -> None:
        """Ask processes to end, each once."""
        for process in set(processes) - self._known:
            self._known.add(process)
            _send(process, signal.SIGTERM)

    def is_alive(self) -> bool:
        """Whether anything is left that runs, also what others have started as they ended."""
        now = time.monotonic()
        if now - self._looked < _SAME_GROUP_SECONDS:
            self.ask(_list_group(self._leader))
        self._looked = now
        self._known = {process for process in self._known if _is_running(process)}
        return bool(self._known)

    def kill(self) -> bool:
        """Kill what has not obeyed in time, those that remove shared memory last; return whether to go on looking."""
        if time.monotonic() < self._due:
            return True
        for process in self._known:
            if not (self._spares_trackers and _is_tracker(process)):
                _send(process, signals.KILL)
        self._due = time.monotonic() + _GONE_SECONDS
        goes_on, self._spares_trackers = self._spares_trackers, False
        return goes_on


class Leftovers:
    """What the workers of a group have left running.

    First it is asked to end by SIGTERM. Python's process that removes forgotten shared memory ignores that, and ends by
    itself when the others have. What is still there after a second is killed.
    """

    def __init__(self) -> None:
        self._left: dict[int, _Left] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def end(self, leader: int, below: Sequence[psutil.Process] = ()) -> None:
        """Ask what a worker has left to end; never waits.

        Args:
            leader: process id of the worker, which has ended and led a process group.
            below: what it has started elsewhere.
        """
        if leader in self._left:
            self._left[leader].ask(below)
        elif below or signals.kill_group(leader, 0):
            self._left[leader] = _Left(leader, below)

    def look(self) -> None:
        """Kill what has not obeyed in time; never waits."""
        for leader, left in list(self._left.items()):
            if not left.is_alive() or not left.kill():
                del self._left[leader]

    def finish(self) -> None:
        """Wait until nothing is left: for some milliseconds where all obey, else for two seconds at most."""
        while self._left:
            self.look()
            time.sleep(_LOOK_SECONDS if self._left else 0)


def _list_group(leader: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    if sys.platform != "win32" and signals.kill_group(leader, 0):
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getpgid(pid) == leader:
                    found.append(psutil.Process(pid))
    return found


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any(_TRACKER in word for word in process.cmdline())
    except psutil.Error:
        return False


def _send(process: psutil.Process, signum: int) -> None:
    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(signum)
