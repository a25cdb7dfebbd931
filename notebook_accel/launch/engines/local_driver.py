"""The process of a run that outlives its notebook: it starts the ranks on this machine and writes what they say."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ...config.argument_checks import parse_port
from ...events import Event
from ...stream.logs import LogFiles
from ...stream.record import RunRecord
from .. import descriptors
from ..agent import client
from ..agent.parent_state import ParentState
from ..job import Job, Rendezvous
from ..supervise.control import Control
from ..transfer import failures
from ..transfer.shared_memory import SharedPickle
from .base import Outcome
from .detached.driving import StopWatch, make_over
from .detached.folder import Folder, Lock
from .detached.recording import Over, Writer
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
    folder, control, record = Folder(Path(path)), Control(), RunRecord()
    signal.signal(signal.SIGTERM, lambda *_: control.stop(_GRACE))
    stop = StopWatch(folder, control, _LOOK_SECONDS)
    writer = Writer(folder.recording, 0)
    logs: list[LogFiles] = []

    def deliver(events: Sequence[Event]) -> None:
        record.apply_all(events)
        writer.write(events)
        for each in logs:
            each.show(events)
        stop.look()

    try:
        job = folder.read_job()
        port = parse_port(job.options["use_port"]) or 0
        job = replace(job, background=True, rendezvous=Rendezvous(port=port))
        if job.log_dir is not None:
            logs.append(LogFiles(job.log_dir, job.name))
        engine = _DetachedEngine(payload, state)
        outcome: Outcome = engine.run(job, record, deliver, control)
        over = make_over(outcome, control)
    except BaseException as error:
        over = Over(rank=-1, time=time.time(), error=failures.describe(error))
    for each in logs:
        each.close()
    folder.note_end(over.describe_status(has_failed_ranks=bool(record.failures)))
    writer.close(over)
    client.end()
    lock.close()
    return 0
