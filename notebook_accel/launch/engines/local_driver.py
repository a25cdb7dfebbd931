"""The process of a run that outlives its notebook: it starts the ranks on this machine and writes what they say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import descriptors
from ..agent import client
from ..agent.parent_state import ParentState
from ..job import Job
from ..transfer.shared_memory import SharedPickle
from .detached.driving import Driver
from .detached.folder import Folder, Lock
from .local import LocalEngine, Plan


class _DetachedEngine(LocalEngine):
    """Starts ranks of a run that another process has planned.

    Args:
        payload: the function and its arguments.
        state: what the workers find of that process.
    """

    def __init__(self, payload: SharedPickle, state: ParentState) -> None:
        self._payload, self._state = payload, state

    @contextlib.contextmanager
    def plan(self, job: Job) -> Iterator[Plan]:
        """Return what the notebook gave."""
        plan = Plan(payload=self._payload, parent_state=self._state, setup=None)
        try:
            yield plan
        finally:
            plan.store = None  # this closes it


def main(path: str, state: ParentState, layout: Any, lock_fd: int, *fds: int) -> int:
    """Run a job, and write to its folder what it says; return the exit code.

    Args:
        path: of the folder, which has the job.
        state: what the workers find of the process that launched it.
        layout: of the memory with the function and its arguments.
        lock_fd: descriptor of the folder's lock, held.
        fds: of the memory.
    """
    lock, payload = Lock(lock_fd), SharedPickle.from_filenos(layout, fds)
    descriptors.keep_from_forks(payload)
    client.fork()
    os.umask(0o077)  # workers have the notebook's
    Driver(Folder(Path(path))).run(_DetachedEngine(payload, state))
    client.end()
    lock.close()
    return 0
