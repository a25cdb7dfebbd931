"""What `attach` watches: a run that goes on without the process that launched it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ..config import argument_checks, arguments
from .checks.problems import raise_all
from .durations import Start
from .engines import base
from .engines.base import Engine
from .engines.slurm import naming, recording
from .job import Job

_CALLER: Final = "attach"
_PREFIX: Final = "log_line_prefix_template"


def find(job: Any, options: Mapping[str, Any]) -> tuple[Job, Engine, Start]:
    """Return what a job runs, the engine that watches it, and when it was launched.

    Args:
        job: number of the job of SLURM; None is the one that was launched last.
        options: arguments of `attach` by their names at `notebook_launcher`; None is what the launch has.

    Raises:
        ValueError, TypeError: an argument is wrong.
        LaunchError: nothing is known of the job.
    """
    __tracebackhide__ = True
    given = {name: value for name, value in options.items() if (name, value) != (_PREFIX, None)}
    wrong = argument_checks.find_problems(arguments.checks(), {**arguments.defaults(), **given}, {})
    problems = [problem for found in wrong.values() for problem in found]
    job_id = str(job).strip()
    is_number = not isinstance(job, (bool, float)) and job_id.isascii() and job_id.isdecimal()
    if job is not None and not is_number:
        problems.insert(0, ValueError(f"job={job!r}: the number of a job is needed"))
    raise_all(problems, _CALLER)
    try:
        return _find(job, job_id, options)
    except KeyboardInterrupt:  # without our own frames: SLURM may take long to answer
        raise KeyboardInterrupt(f"{_CALLER}: the run goes on, if it has not ended") from None


def _find(job: Any, job_id: str, options: Mapping[str, Any]) -> tuple[Job, Engine, Start]:
    cluster = naming.find_cluster()
    job_id = naming.find_newest(cluster) if job is None else job_id
    folder = naming.find(job_id, cluster)
    folder.install_cells()
    recorded = folder.read_job()
    found = replace(
        recorded,
        background=not options["block"],
        view=options["view"],
        output=options["output"],
        prefix=options[_PREFIX] or recorded.prefix,
        options={**recorded.options, "detach": job_id, recording.FOLDER: folder},
    )
    return found, base.find(found.engine), Start.at(found.options[recording.LAUNCHED])
