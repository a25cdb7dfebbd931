"""The process of a job that outlives its notebook, on its first node: it starts the ranks and writes what they say.

Run as `python -m notebook_accel.launch.engines.slurm.driver FOLDER`, in a job.
"""

from __future__ import annotations

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
from ....stream.logs import LogFiles
from ....stream.record import RunRecord
from ...job import Job
from ...supervise.control import Control
from ...supervise.delivery import Deliver
from ...transfer import failures
from ...transfer.pickled import Pickled
from ..base import Outcome
from ..detached.driving import StopWatch, make_over
from ..detached.recording import Over, Writer
from ..remote.client import Wanted
from ..remote.hosts_engine import Origin
from ..remote.hosts_group import Plan
from . import naming
from .engine import SlurmEngine, describe_size
from .job_folder import JobFolder, Work

_LOOK_SECONDS: Final = 2.0
_GRACE: Final = 30.0  # where a machine does not see yet how long ranks have
_LAST_SECONDS: Final = 3.0  # in which the last words of ranks come; sites that kill at once have less
_QUIET_SECONDS: Final = 1.0  # after which none are expected
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


class _End:
    """Lets the last words of ranks be written when SLURM ends the job; it kills all processes some seconds later.

    Attributes:
        is_near: whether SLURM has said so.
    """

    def __init__(self) -> None:
        self.is_near = False
        self._deadline = self._quiet_since = float("inf")

    def note_signal(self, signum: int, frame: Any) -> None:
        """Note that SLURM ends the job."""
        if not self.is_near:
            now = time.monotonic()
            self.is_near, self._deadline, self._quiet_since = True, now + _LAST_SECONDS, now

    def keep(self, events: Sequence[Event]) -> list[Event]:
        """Return those of some events that a notebook is to see; how ranks end is SLURM's doing, and says nothing."""
        if not self.is_near:
            return list(events)
        kept = [event for event in events if not isinstance(event, (Failure, Notice, Phase))]
        if kept:
            self._quiet_since = time.monotonic()
        return kept

    def has_come(self, events: Sequence[Event]) -> bool:
        """Return whether nothing more is worth waiting for.

        Args:
            events: those that have just come.
        """
        if any(isinstance(event, Phase) and event.name == "restarting" for event in events):
            return self.is_near
        now = time.monotonic()
        return now > self._deadline or now - self._quiet_since > _QUIET_SECONDS

    def expect(self) -> None:
        """Wait a moment for SLURM's word: ranks and connections may have ended because it ends the job."""
        deadline = time.monotonic() + _LOOK_SECONDS
        while not self.is_near and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS / 40)


def main(path: str) -> int:
    """Run what a folder has, and write there what it says; return the exit code of the job."""
    folder = JobFolder(Path(path))
    naming.name(folder, environ.get("SLURM_JOB_ID") or "none")
    restarts = int(environ.get("SLURM_RESTART_COUNT") or 0)
    first = max(restarts, folder.read_attempt() + 1) if restarts else 0
    attempts = itertools.count(first if restarts else 1)
    control = Control()
    stop, end = StopWatch(folder, control, _LOOK_SECONDS, _GRACE), _End()
    signal.signal(signal.SIGTERM, end.note_signal)
    signal.signal(signal.SIGUSR1, stop.note_signal)
    writer = Writer(folder.recording, restarts)
    record = RunRecord()
    logs: list[LogFiles] = []

    def leave() -> NoReturn:
        for each in logs:
            each.close()
        writer.leave()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # the connections end with it, and with them what they lead to
        os._exit(_ENDED)

    def deliver(events: Sequence[Event]) -> None:
        kept = end.keep(events)
        record.apply_all(kept)
        for event in kept:
            if isinstance(event, Phase) and event.name == "restarting":
                folder.note_attempt(next(attempts))
        writer.write(kept)
        for each in logs:
            each.show(kept)
        stop.look()
        if end.has_come(events):
            leave()

    try:
        job = folder.read_job()
        if job.log_dir is not None:
            logs.append(LogFiles(job.log_dir, job.name))
        over = _run(job, folder, first, record, deliver, control)
        is_cut = not over.was_stopped and len(record.results) < job.local_world_size
    except BaseException as error:
        over, is_cut = Over(rank=-1, time=time.time(), error=failures.describe(error)), True
    if is_cut and (over.error is not None or any(failure.error is None for failure in record.failures)):
        end.expect()
    if is_cut and end.is_near:
        leave()
    for each in logs:
        each.close()
    status = over.describe_status(has_failed_ranks=bool(record.failures))
    folder.note_end(status)
    writer.close(over)
    folder.forget_work()
    return int(status == "failed")


def _run(
    job: Job, folder: JobFolder, first: int, record: RunRecord, deliver: Deliver, control: Control
) -> Over:
    if first:
        if first > job.max_restarts:
            raise LaunchError(
                f"SLURM has queued the job again, which is restart {first}, and max_restarts={job.max_restarts} allows "
                "no more"
            )
        text = f"SLURM has queued the job again; restart {first} of {job.max_restarts}"
        deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=text)])
    outcome: Outcome = _JobEngine(folder.read_work(), first).run(job, record, deliver, control)
    return make_over(outcome, control)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
