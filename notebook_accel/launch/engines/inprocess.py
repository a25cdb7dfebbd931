"""Runs the function in this process, without workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from ... import environ, interrupts, runtime
from ...events import Metric
from ...stream.record import RunRecord
from ...takeover import finder
from ..checks import xla_runtime
from ..children import start_as_in_workers
from ..job import Job
from ..leftovers import make_sockets_folder
from ..supervise.control import Control
from ..supervise.delivery import Deliver
from ..worker.order_listener import make_pulse
from .base import Engine, Outcome


class InProcessEngine(Engine):
    """Calls the function in this process. Its output, displays and errors appear in the cell as those of any call."""

    name = "inprocess"
    has_workers = False
    refuses: ClassVar[Mapping[str, str]] = {
        "num_processes": "it runs the function in this process, and there is one of it",
        "num_nodes": "it runs the function in this process, which is not part of a larger run",
        "block": "a run in the background needs worker processes",
        "on_hang": "a hang is not noticed when the function runs in this process",
        "log_dir": "when the function runs in this process, its output is the cell's own",
        "address": "it runs the function in this process",
    }

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Call the function, and return its value as that of rank 0; see `Engine.run`.

        Raises:
            BaseException: what the function raises.
        """
        __tracebackhide__ = True
        deliver([self.announce(job)])
        if environ.flag_in(job.environment, finder.VARIABLE):
            finder.take_over_accelerate()
        make_sockets_folder()
        before, reporter_before = runtime.slot(), runtime.reporter()
        runtime.enter(runtime.Slot())
        runtime.set_reporter(CellReporter(deliver, control))
        try:
            with (
                environ.patch_environment(**job.environment),
                start_as_in_workers(),
                interrupts.allow_interrupt(),
            ):
                if job.tpu_mode == "spmd":
                    xla_runtime.shard()
                value = job.function(*job.args)
        finally:
            runtime.set_reporter(reporter_before)
            runtime.enter(before)
        return Outcome(values={0: value})


class CellReporter:
    """Delivers the metrics of a function that runs in this process; `runtime.Reporter` for the notebook.

    Args:
        deliver: takes the events.
        control: says whether somebody asked the run to stop.
    """

    def __init__(self, deliver: Deliver, control: Control) -> None:
        self._deliver = deliver
        self._control = control

    def takes_metrics(self, names: Iterable[str]) -> bool:
        """Return True: there is no other rank."""
        return True

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Deliver the metrics of one step, and how far the training has come.

        Args:
            values: metrics by name.
            step: number of the step; None without one.
        """
        now = time.time()
        self._deliver([Metric(rank=0, time=now, values=values, step=step), make_pulse(0, now)])

    def flush(self) -> None:
        """Flush stdout and stderr."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    def note_save(self, name: str, folders: Sequence[str], is_over: bool) -> None:
        """Do nothing: this process stays, and so does its thread that writes the checkpoint."""

    def should_stop(self) -> bool:
        """Return whether somebody asked the run to stop."""
        return self._control.stop_is_asked
