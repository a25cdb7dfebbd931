"""A run in the cell: from a job to its value, or to the error of the rank that failed first."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Sequence
from typing import Any

from ..events import Event, Failure
from ..stream.record import RunRecord
from ..stream.sinks import TextSink
from . import failures
from .engines.base import Engine, Outcome
from .engines.inprocess import InProcessEngine
from .job import Job


def launch(job: Job) -> Any:
    """Run a checked job in the cell and return what it returns."""
    __tracebackhide__ = True
    run = Run(job, _engine(job))
    try:
        outcome = run.wait()
    except KeyboardInterrupt:
        if not job.distributed:
            raise
        raise KeyboardInterrupt(f"{job.name}: all workers have ended") from None  # without our own frames
    return run.result(outcome)


def _engine(job: Job) -> Engine:
    if not job.distributed:
        return InProcessEngine()
    from .engines.elastic import ElasticEngine  # torch elastic takes a while to import

    return ElasticEngine()


def _notes_are_shown() -> bool:
    """Whether a traceback shows an exception's notes: on Python 3.10, and in old versions of IPython, it does not."""
    shown_by = sys.modules.get("IPython.core.ultratb")
    in_python = sys.version_info >= (3, 11)
    return in_python and (shown_by is None or "__notes__" in inspect.getsource(shown_by))


class Run:
    """The live handle of one launch.

    Attributes:
        job: what runs.
        record: everything that it has said.
    """

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self.record = RunRecord()
        self._engine = engine
        self._sink = TextSink(job.output, job.prefix)
        self._started = time.time()

    def wait(self) -> Outcome:
        """Run the job to its end, and show its output meanwhile."""
        __tracebackhide__ = True
        try:
            return self._engine.run(self.job, self.record, self._deliver)
        finally:
            self._sink.close()

    def result(self, outcome: Outcome) -> Any:
        """Return what the launch returns.

        Raises:
            BaseException: a rank's own exception, or a WorkerError where a rank ended without one.
        """
        __tracebackhide__ = True
        if outcome.failures:
            raise self.error(outcome)
        if self.job.returns == "all":
            return [outcome.values.get(rank) for rank in sorted(outcome.values)]
        if self.job.returns == "first":
            return outcome.values[min(outcome.values)]
        return None

    def error(self, outcome: Outcome) -> BaseException:
        """Return the exception of the rank that failed first, with a line for each other rank."""
        cause = failures.first(outcome.failures)
        if cause.error is not None:
            error = failures.revive(cause.error, cause.rank, cause.pid)
        else:
            error = failures.silent_end(cause)
        notes = self._notes(cause, outcome)
        for note in notes:
            failures.add_note(error, note)
        if not _notes_are_shown():
            self._sink.note("\n".join(notes))
        return error

    def _notes(self, cause: Failure, outcome: Outcome) -> list[str]:
        after = max(0.0, cause.time - self._started)
        notes = []
        if cause.error is not None:
            notes.append(f"rank {cause.rank} (process {cause.pid}) raised this after {after:.1f} s")
        others = {
            failure.rank: failures.one_line(failure) for failure in outcome.failures if failure is not cause
        }
        for rank in outcome.stopped - others.keys() - {cause.rank}:
            others[rank] = f"rank {rank} was stopped by the launcher"
        return notes + [others[rank] for rank in sorted(others)]

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self.record.apply(event)
        self._sink.show(events)
