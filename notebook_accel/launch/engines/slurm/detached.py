"""A run that outlives its notebook: its job starts the ranks itself, and notebooks read what it writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ....errors import LaunchError
from ....events import Notice, Phase, PhaseName
from ....stream.record import RunRecord
from ... import signals
from ...job import Job
from ...supervise.control import Control
from ...supervise.delivery import Deliver
from ...transfer.pickled import Pickled
from ..base import Outcome
from ..detached.folder import VARIABLE, Folder, make
from ..detached.recording import Over
from ..detached.watch import SILENT_SECONDS, Watch
from ..remote.client import NO_PACKAGE, Wanted
from ..remote.hosts_engine import Origin
from ..remote.pool import get_pool
from . import command, submission
from .command import JobState
from .submission import Wish

WORK: Final = "work"
"""The file of a run with what its job runs."""
_FIRST_LOOK_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 10.0
_LAST_SECONDS: Final = 20.0  # in which what a job has written is seen everywhere
_OBEY_SECONDS: Final = 30.0
_OUTAGE_SECONDS: Final = 900.0


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a job runs that outlives its notebook.

    Attributes:
        pickled: the function with its arguments.
        origin: what its ranks take from the process that launched it.
        wanted: what the environment of the nodes has to be: that process's.
    """

    pickled: Pickled
    origin: Origin
    wanted: Wanted


def submit(job: Job, work: Work, wish: Wish) -> Folder:
    """Submit a job that runs without this process; return the folder of its run, which the nodes see too.

    Args:
        job: what runs.
        work: its function, and what its ranks take from this process.
        wish: what is asked of SLURM.

    Raises:
        LaunchError: SLURM refuses it, or the folder cannot be filled.
    """
    cluster = command.find_cluster()
    folder, job_id = make(for_job=True), ""
    try:
        folder.fill(job, work.origin.notes.sources, {"cluster": cluster})
        folder.write(WORK, work)
        job_id = submission.submit_run(wish, folder.path)
        folder.add_metadata(job=job_id)
    except BaseException as error:
        folder.remove()  # else a full disk would stay full
        if job_id:
            submission.cancel(job_id)
        if isinstance(error, OSError):
            raise LaunchError(
                f"the run cannot be left to its job: {error}; {VARIABLE} names another folder, which the nodes see too"
            ) from error
        raise
    return folder


class JobWatch(Watch):
    """Shows a run of a job, from its beginning to its end or until it is left.

    Args:
        folder: of the run.
        record: of the run.
        deliver: takes events.
        control: says when the run is to stop, or is left.
    """

    def __init__(self, folder: Folder, record: RunRecord, deliver: Deliver, control: Control) -> None:
        self._job_id = job_id = folder.number
        super().__init__(folder, record, deliver, control)
        self._state = JobState(job_id=job_id, state="PENDING")
        self._looked = self._next_look = time.monotonic()
        self._silent_since: float | None = None
        self._shown = ""
        self._stop_deadline = float("inf")
        self._last = float("inf")

    def note_end(self, over: Over) -> None:
        """Say that the job is over, where what was shown last says that it goes on."""
        if self._shown:
            self.say(Notice(rank=-1, time=over.time, text=f"Job {self._job_id} is over."))

    def note_begin(self) -> None:
        """Look at the job at once, and end the wait that its launch began."""
        self._next_look = time.monotonic()
        get_pool().end_wait(self._record)

    def pass_stop_on(self, grace: float) -> None:
        """Leave word in the folder, and let SLURM wake who drives the run; cancel a job that has not begun."""
        self._stop_deadline = time.monotonic() + grace + _OBEY_SECONDS
        is_told = True
        try:
            self._folder.ask_to_stop(grace)
        except OSError:  # a full disk: then the job gives the usual time, or none
            is_told = grace > 0
        with contextlib.suppress(LaunchError):  # what is known is older
            self._state = command.look(self._job_id, self._go_on_reading)
        if self._state.is_over:
            return
        runs = self._state.is_running and self._reader.has_begun
        self._cancel(["--batch", "--signal=USR1"] if runs and is_told else [])

    def insist(self) -> None:
        """Cancel a job that does not obey."""
        if time.monotonic() > self._stop_deadline:
            self._stop_deadline = float("inf")
            self._cancel([])

    def _cancel(self, words: Sequence[str]) -> None:
        try:
            command.ask(["scancel", *words, self._job_id], self.pass_on)  # nobody would try again
        except LaunchError as error:  # it has just ended, or SLURM does not answer
            self.say(Notice(rank=-1, time=time.time(), text=f"scancel: {error}"))
        self._next_look = time.monotonic()

    def look(self) -> Outcome | None:
        """Ask SLURM now and then how the job stands; return the outcome where it has ended and says nothing more."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        is_last = now >= self._last
        pause = min(_LOOK_SECONDS, max(_FIRST_LOOK_SECONDS, (now - self._looked) / 10))
        self._next_look = min(now + pause, max(now + _FIRST_LOOK_SECONDS, self._last))
        try:
            self._state = command.look(self._job_id, self._go_on_reading)
            self._silent_since = None
        except LaunchError:
            self._silent_since = self._silent_since or now
            if now - self._silent_since > _OUTAGE_SECONDS:
                raise
            return None
        if not self._state.is_over:
            self._last = float("inf")  # a job that is queued again may look over for a moment
        elif is_last:
            return self._make_lost_outcome()
        elif self._last == float("inf"):
            # once it is over, all of it is written; on another machine it may be seen later
            is_fresh = self._reader.has_begun and self._has_just_ended() and not self._has_left
            self._last = time.monotonic() + (_LAST_SECONDS if is_fresh else 0.0 if self._has_left else 2.0)
            self._next_look = min(self._next_look, self._last)
            text = f"Job {self._job_id} is over: {self._state.describe()}."
            text += " Its last words are waited for." if is_fresh else ""
            self.say(Notice(rank=-1, time=time.time(), text=text))
        if not self._state.is_over:
            self._show_state()
        return None

    def _has_just_ended(self) -> bool:
        """Return whether the job has ended a short time ago; SLURM does not know those any more that ended long ago."""
        end = self._state.end
        return self._state.state != "UNKNOWN" and (end is None or time.time() - end < _LAST_SECONDS)

    def _go_on_reading(self) -> None:
        """Show what comes while SLURM is asked: it may not answer for a minute."""
        self.pass_on()
        self.check_left()

    def _show_state(self) -> None:
        """Say how the job stands, where that has changed."""
        start = self._state.start
        has_begun = self._reader.has_begun and self._state.is_running
        known = self._state.state == "PENDING" and start is not None and start > time.time()
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start)) if known else "not known yet"
        how = f"{self._state.describe()}, estimated start {when}"
        if self._state.is_running:
            how = f"RUNNING on {self._state.node_list}, its ranks start"
        if has_begun:
            how = f"RUNNING on {self._state.node_list}"
        again = f": notebook_accel.attach({self._job_id}) shows it again" if has_begun else ""
        text = f"Job {self._job_id}{self._describe_preemption()}: {how}. It goes on without this notebook{again}."
        if not self._state.is_running:
            self._heard = time.monotonic()  # a job that waits says nothing
        if has_begun and time.monotonic() - self._heard > SILENT_SECONDS:
            text = self._describe_silence()
        if text != self._shown:
            self._shown, now = text, time.time()
            name: PhaseName = "starting" if self._state.is_running else "queued"
            ranks = [] if has_begun else sorted({-1, *self._record.phases})  # of an earlier start
            self.say(*[Phase(rank=rank, time=now, name=name) for rank in ranks])
            self.say(Notice(rank=-1, time=now, text=text))

    def _describe_preemption(self) -> str:
        """Return that a job waits because another one got its nodes; empty where that is not so."""
        waits = self._reader.has_begun and not self._state.is_running
        is_preempted = waits and command.tells_of_preemption("\n".join(self._folder.read_log()))
        return " was preempted and is queued again" if is_preempted else ""

    def _describe_silence(self) -> str:
        """Return what to look at where a job writes nothing: it is due to say at least that it can."""
        return (
            f"Job {self._job_id} runs, and nothing has come from it for {SILENT_SECONDS:g} s: is there room for what "
            f"it writes in {self._folder.path}?"
        )

    def _make_lost_outcome(self) -> Outcome:
        """Return the outcome of a job that has ended without a word."""
        if self._state.state != "UNKNOWN":  # it may be a job of another cluster with the same folder
            self._folder.forget(WORK)
            self._folder.note_end("stopped" if self.was_asked_to_stop else "failed")
        if self.was_asked_to_stop:
            return self.make_stopped_outcome(self._find_end())
        text = f"job {self._job_id} has ended: {self._state.describe()}"
        if self._state.state == command.PREEMPTED:
            text = self._state.describe_loss()
        if self._state.state == "COMPLETED":
            text += f"; the end of the run is missing in {self._folder.path}"
        if self._state.state == "FAILED" and self._state.signum:
            cause = signals.likely_cause(self._state.signum)
            text += f"; its own process was ended by {signals.name_of(self._state.signum)}"
            text += f" ({cause})" if cause else ""
        if self._state.exit_code == str(NO_PACKAGE):
            python = self._folder.read_job().options["python"]
            what = f"{python} is not there, or lacks" if python else "no Python has"
            text += (
                f"; on its first node {what} torch or this package: name one, python='/opt/env/bin/python'"
            )
        if said := [line for line in self._folder.read_log() if line.strip()]:
            text += "\n" + "\n".join(said)
        return Outcome(error=LaunchError(text), ended=self._find_end())

    def _find_end(self) -> float | None:
        """Return when a job ended that says nothing of it: SLURM knows, or it was soon after its last word."""
        if self._state.state != "UNKNOWN" and self._state.end is not None:
            return self._state.end
        return self._said or None
