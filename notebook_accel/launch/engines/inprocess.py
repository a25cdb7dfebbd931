"""One process: the function runs here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ... import environ, runtime
from ...stream.record import RunRecord
from .. import chips
from ..control import Control
from ..job import Job
from ..report import CellReporter
from .base import Deliver, Engine, Outcome, announcement


class InProcessEngine(Engine):
    """Calls the function in this process; its output, displays and errors are the cell's own."""

    name = "inprocess"
    has_workers = False
    refuses: ClassVar[Mapping[str, str]] = {
        "num_processes": "it runs the function in this process, and there is one of it",
        "num_nodes": "it runs the function in this process, whose run is its own",
        "block": "a run in the background has processes of its own",
        "on_hang": "nobody watches over a function of this process",
        "log_dir": "what it prints is the cell's own",
        "address": "it runs the function in this process",
    }

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job; an exception of the function passes through."""
        __tracebackhide__ = True
        deliver([announcement(job)])
        before, reporter_before = runtime.current(), runtime.reporter()
        runtime.reset()
        runtime.set_reporter(CellReporter(deliver, control))
        try:
            with environ.patch_environment(**job.environment):
                if job.tpu_mode == "spmd":
                    chips.shard()
                value = job.function(*job.args)
        finally:
            runtime.reset()
            runtime.set_reporter(reporter_before)
            if before is not None:
                runtime.install(before)
        return Outcome(values={0: value})
