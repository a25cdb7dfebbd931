"""The process of a run that outlives its notebook: it starts the ranks on this machine and writes what they say."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...config.argument_checks import parse_port
from .. import descriptors
from ..agent import client
from ..agent.parent_state import ParentState
from ..job import Job, Rendezvous
from ..transfer.shared_memory import SharedPickle
from .base import Outcome
from .detached.driving import Driver
from .detached.folder import Folder, Lock
from .local import LocalEngine, Plan

_LOOK_SECONDS: Final = 0.2
_GRACE: Final = 30.0  # where the system asks this process to end


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

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return nothing: the notebook has said it."""
        return ""


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
    driver = Driver(Folder(Path(path)), _LOOK_SECONDS, grace=_GRACE)
    signal.signal(signal.SIGTERM, driver.note_stop_signal)

    def run(job: Job) -> Outcome:
        port = parse_port(job.options["use_port"]) or 0
        job = replace(job, background=True, rendezvous=Rendezvous(port=port))
        return _DetachedEngine(payload, state).run(job, driver.record, driver.deliver, driver.control)

    driver.close(driver.drive(run))
    client.end()
    lock.close()
    return 0
