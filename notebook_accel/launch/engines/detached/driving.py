"""Drives a run that outlives its notebook: starts its ranks, and writes what they say to its folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from ....config.argument_checks import parse_port
from ....events import Event
from ....stream.logs import LogFiles, make_folder
from ....stream.record import RunRecord
from ...job import Job, Rendezvous
from ...supervise.control import Control
from ...transfer import failures
from ..base import Engine, Outcome
from .folder import Folder
from .recording import Over, Writer

_LOOK_SECONDS: Final = 0.2
_GRACE: Final = 30.0  # where a signal says that the run is to stop, and the folder not yet


class Driver:
    """Runs what a folder has.

    Args:
        folder: of the run.
        look_seconds: between two looks whether somebody has asked the run to stop.
        start: how often the run was started before.
    """

    def __init__(self, folder: Folder, look_seconds: float = _LOOK_SECONDS, start: int = 0) -> None:
        self.folder, self.control, self.record = folder, Control(), RunRecord()
        self._writer = Writer(folder.recording, start)
        self._logs: list[LogFiles] = []
        self._look_seconds = look_seconds
        self._is_asked, self._looked = False, time.monotonic()
        self._grace: float | None = None

    def run(self, engine: Engine) -> str:
        """Run the job by an engine, to its end, and write that; return it as a word."""

        def run(job: Job) -> Outcome:
            port = parse_port(job.options["use_port"]) or 0
            job = replace(job, background=True, quiet=True, rendezvous=Rendezvous(port=port))
            return engine.run(job, self.record, self.deliver, self.control)

        signal.signal(signal.SIGTERM, self.note_stop_signal)
        return self.close(self.drive(run))

    def note_stop_signal(self, signum: int, frame: Any) -> None:
        """Look at once: somebody has just asked."""
        self._is_asked = True

    def drive(self, run: Callable[[Job], Outcome]) -> Over:
        """Return how the run has ended, which `close` writes.

        Args:
            run: runs the job, and lets `deliver` have its events.
        """
        try:
            job = self.folder.read_job()
            if job.log_dir is not None:
                make_folder(job.log_dir)
                self._logs.append(LogFiles(job.log_dir, job.name))
            outcome = run(job)
        except BaseException as error:
            return Over(rank=-1, time=time.time(), error=failures.describe(error))
        return Over(
            rank=-1,
            time=time.time(),
            stopped=sorted(outcome.stopped),
            was_stopped=outcome.was_stopped,
            was_asked=self.control.stop_is_asked,
            hang=outcome.hang,
            error=None if outcome.error is None else failures.describe(outcome.error),
        )

    def deliver(self, events: Sequence[Event]) -> None:
        """Take events of the run; called several times a second, also without any."""
        self.record.apply_all(events)
        self._writer.write(events)
        for each in self._logs:
            each.show(events)
        self._look_for_stop()

    def _look_for_stop(self) -> None:
        now = time.monotonic()
        if not self._is_asked and now - self._looked < self._look_seconds:
            return
        grace = self.folder.read_stop()
        if grace is None and self._is_asked:  # it is not seen here yet
            grace = _GRACE
        self._is_asked, self._looked = False, now
        if grace is not None and (self._grace is None or grace < self._grace):
            self._grace = grace
            self.control.stop(grace)

    def close(self, over: Over) -> str:
        """Write how the run has ended, and return that as a word."""
        self._close_logs()
        status = over.describe_status(has_failed_ranks=bool(self.record.failures))
        self.folder.note_end(status)
        self._writer.close(over)
        return status

    def leave(self) -> None:
        """Write what is there, and no end of the run: see `Writer.leave`."""
        self._close_logs()
        self._writer.leave()

    def _close_logs(self) -> None:
        for each in self._logs:
            each.close()
