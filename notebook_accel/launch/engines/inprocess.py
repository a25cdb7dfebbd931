"""One process: the function runs here."""

from __future__ import annotations

from ... import environ, runtime
from ...stream.record import RunRecord
from ..control import Control
from ..job import Job
from ..report import CellReporter
from .base import Deliver, Engine, Outcome, announcement


class InProcessEngine(Engine):
    """Calls the function in this process; its output, displays and errors are the cell's own."""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job; an exception of the function passes through."""
        __tracebackhide__ = True
        deliver([announcement(job)])
        before, reporter_before = runtime.current(), runtime.reporter()
        runtime.reset()
        runtime.set_reporter(CellReporter(deliver, control))
        try:
            with environ.patch_environment(**job.environment):
                value = job.function(*job.args)
        finally:
            runtime.reset()
            runtime.set_reporter(reporter_before)
            if before is not None:
                runtime.install(before)
        return Outcome(values={0: value})
