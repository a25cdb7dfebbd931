"""From a checked job to a run: in the cell, or in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import registry
from .engines.base import Engine
from .job import Job
from .run import MakeSink, Run


def launch(job: Job, sinks: Sequence[MakeSink]) -> Any:
    """Run a checked job in the cell and return what it returns."""
    __tracebackhide__ = True
    run = _made(job, sinks)
    try:
        run.execute()
    except KeyboardInterrupt:
        if not job.distributed:
            raise
        raise KeyboardInterrupt(f"{job.name}: all workers have ended") from None  # without our own frames
    return run.give()


def launch_in_background(job: Job, sinks: Sequence[MakeSink]) -> Run:
    """Start a checked job and return its run."""
    __tracebackhide__ = True
    run = _made(job, sinks)
    run.start()
    return run


def _made(job: Job, sinks: Sequence[MakeSink]) -> Run:
    job = registry.settled(job)
    assert isinstance(job.engine, Engine), "the job was checked"
    run = Run(job, job.engine, sinks)
    if not job.quiet:
        registry.add(run)
    return run
