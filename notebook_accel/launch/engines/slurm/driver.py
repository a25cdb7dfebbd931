"""The process of a job that outlives its notebook, on its first node: it starts the ranks and writes what they say.

Run as `python -m notebook_accel.launch.engines.slurm.driver FOLDER`, in a job.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from .... import environ
from ....errors import LaunchError
from ....events import Event, Failure, Notice, Phase
from ...job import Job
from ...transfer.pickled import Pickled
from ..base import Outcome
from ..detached.driving import Driver
from ..detached.folder import Folder
from ..detached.recording import Over
from ..remote.client import Wanted
from ..remote.hosts_engine import Origin
from ..remote.hosts_group import Plan
from .detached import WORK, Work
from .engine import SlurmEngine, describe_size

_LOOK_SECONDS: Final = 2.0
_LAST_SECONDS: Final = 2.0  # in which the last words of ranks come; sites that kill at once have less
_ATTEMPT: Final = "attempt"
_ENDED: Final = 128 + signal.SIGTERM


class _JobEngine(SlurmEngine):
    """Starts ranks in the job that this process runs in; function and variables are of the notebook that submitted it.

    Args:
        work: these.
        first_attempt: its number: earlier starts of the job count as restarts of the run, with those in them.
    """

    def __init__(self, work: Work, first_attempt: int) -> None:
        self._work, self.first_attempt = work, first_attempt

    def take(self, job: Job) -> tuple[Pickled, Origin]:
        """Return what the notebook gave."""
        return self._work.pickled, self._work.origin

    def describe_wanted(self) -> Wanted:
        """Return what the notebook has."""
        return self._work.wanted

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return which job the ranks are of."""
        what = describe_size(job.local_world_size, len(plan.counts))
        return f"Job {environ.get('SLURM_JOB_ID')}: {job.name} starts on {what}."


class _JobDriver(Driver):
    """Runs a job until SLURM ends it: then the last words of ranks are written, and nothing of how they end."""

    def __init__(self, folder: Folder) -> None:
        restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
        super().__init__(folder, _LOOK_SECONDS, restarts)
        self._first = max(restarts, self._read_attempt() + 1) if restarts else 0
        self._attempts = itertools.count(self._first or 1)
        self._ends_at: float | None = None  # by the monotonic clock, once SLURM ends the job

    def note_end_signal(self, signum: int, frame: Any) -> None:
        """Note that SLURM ends the job; it kills all processes some seconds later."""
        self._ends_at = self._ends_at or time.monotonic() + _LAST_SECONDS

    def deliver(self, events: Sequence[Event]) -> None:
        """Take events of the run; once SLURM ends the job, for some seconds more."""
        starts_again = [event for event in events if isinstance(event, Phase) and event.name == "restarting"]
        if self._ends_at is not None:
            events = [event for event in events if not isinstance(event, (Failure, Notice, Phase))]
        else:
            for _ in starts_again:
                self._note_attempt()
        super().deliver(events)
        if self._ends_at is not None and (starts_again or time.monotonic() > self._ends_at):
            self._die()

    def _note_attempt(self) -> None:
        with contextlib.suppress(OSError):  # a full disk
            (self.folder.path / _ATTEMPT).write_text(str(next(self._attempts)))

    def _read_attempt(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder.path / _ATTEMPT).read_text())
        return 0

    def _die(self) -> NoReturn:
        self.leave()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # the connections end with it, and with them what they lead to
        os._exit(_ENDED)

    def run_job(self, job: Job) -> Outcome:
        """Run the job; its start counts as a restart where SLURM has queued it again."""
        if self._first > job.max_restarts:
            raise LaunchError(
                f"SLURM has queued the job again, which is restart {self._first}, and max_restarts={job.max_restarts} "
                "allows no more"
            )
        if self._first:
            text = f"SLURM has queued the job again; restart {self._first} of {job.max_restarts}"
            self.deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=text)])
        engine = _JobEngine(self.folder.read(WORK), self._first)
        return engine.run(job, self.record, self.deliver, self.control)

    def close(self, over: Over) -> str:
        """Write how the run has ended; not where that is SLURM's doing: it says so itself, or starts the job again."""
        lost = any(failure.error is None for failure in self.record.failures)
        if not over.was_stopped and (over.error is not None or lost):
            deadline = time.monotonic() + _LOOK_SECONDS  # ranks may end before this process hears of it
            while self._ends_at is None and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS / 40)
            if self._ends_at is not None:
                self._die()
        return super().close(over)


def main(path: str) -> int:
    """Run what a folder has, and write there what it says; return the exit code of the job."""
    folder = Folder(Path(path))
    if not folder.job_id:  # the notebook has died before it could tell
        folder.add_metadata(job=environ.get("SLURM_JOB_ID") or "")
    driver = _JobDriver(folder)
    signal.signal(signal.SIGTERM, driver.note_end_signal)
    signal.signal(signal.SIGUSR1, driver.note_stop_signal)
    status = driver.close(driver.drive(driver.run_job))
    folder.forget(WORK)
    return int(status == "failed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
