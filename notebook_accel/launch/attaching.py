"""What `attach` watches: a run that goes on without the process that launched it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from ..config import argument_checks, arguments
from ..errors import LaunchError
from .checks.problems import raise_all
from .durations import Start
from .engines import base
from .engines.base import Engine
from .engines.detached import folder as detached
from .engines.detached.folder import Folder
from .engines.slurm import naming
from .engines.slurm.job_folder import JobFolder, find_root
from .job import Job

_CALLER: Final = "attach"
_PREFIX: Final = "log_line_prefix_template"
_MOST_TOLD: Final = 10


def find(run: Any, options: Mapping[str, Any]) -> tuple[Job, Engine, Start]:
    """Return what a run that was launched with `detach=True` runs, the engine that watches it, and its launch.

    Args:
        run: its number, that of its job of SLURM, or its name; None is the one that was launched last.
        options: arguments of `attach` by their names at `notebook_launcher`; None is what the launch has.

    Raises:
        ValueError, TypeError: an argument is wrong.
        LaunchError: nothing is known of the run.
    """
    __tracebackhide__ = True
    given = {name: value for name, value in options.items() if (name, value) != (_PREFIX, None)}
    wrong = argument_checks.find_problems(arguments.checks(), {**arguments.defaults(), **given}, {})
    problems = [problem for found in wrong.values() for problem in found]
    if run is not None and (isinstance(run, bool) or not isinstance(run, (int, str)) or not str(run).strip()):
        problems.insert(0, ValueError(f"run={run!r}: the number or the name of a run is needed"))
    raise_all(problems, _CALLER)
    try:
        return _find(None if run is None else str(run), options)
    except KeyboardInterrupt:  # without our own frames: SLURM may take long to answer
        raise KeyboardInterrupt(f"{_CALLER}: the run goes on, if it has not ended") from None


def _find(run: str | None, options: Mapping[str, Any]) -> tuple[Job, Engine, Start]:
    folder = _find_folder(run)
    folder.install_cells()
    recorded = folder.read_job()
    watched = replace(
        recorded,
        background=not options["block"],
        view=options["view"],
        output=options["output"],
        prefix=options[_PREFIX] or recorded.prefix,
        options={**recorded.options, "detach": True},
        attached=folder,
        holds=(),
    )
    return watched, base.find(watched.engine), Start.at(folder.launched)


def _find_folder(run: str | None) -> Folder:
    """Return the folder of a run."""
    found: list[Folder] = []
    problem: LaunchError | None = None
    for folder in detached.list_local():
        if run is None or run == (folder.number if run.isdecimal() else folder.read_metadata().get("name")):
            found.append(folder)
    if _has_jobs():
        try:
            found.append(naming.find_job(run))
        except LaunchError as error:
            problem = error
    if run is not None and run.isdecimal() and len(found) > 1:
        raise LaunchError(
            f"{run} is the number of a run on this machine and of a job of SLURM: attach to it by its name"
        )
    if found:
        return max(found, key=lambda each: each.launched)
    raise LaunchError(_describe_absence(run) + (f"; of SLURM: {problem}" if problem is not None else ""))


def _has_jobs() -> bool:
    """Return whether jobs of SLURM are known, so that it is to be asked."""
    return find_root().is_dir()


def _describe_absence(run: str | None) -> str:
    known = [f"{each.number} ({each.read_metadata().get('name')})" for each in detached.list_local()]
    there = f"there are {', '.join(known[-_MOST_TOLD:])}" if known else "there is none"
    which = "no run" if run is None else f"no run {run}"
    return f"{which} is known in {detached.find_state()}, {there}: launch one with detach=True"


def list_runs() -> list[dict[str, str]]:
    """Return what is known of all runs that were launched with `detach=True`, oldest first: texts by heading."""
    rows: list[tuple[float, dict[str, str]]] = []
    folders: list[Folder] = [*detached.list_local()]
    if _has_jobs():
        folders += naming.list_jobs(naming.find_cluster())
    for folder in folders:
        metadata = folder.read_metadata()
        if isinstance(folder, JobFolder):
            end = folder.read_end()
            number, place = f"job {folder.number}", "cluster"
            status = "submitted" if end is None else end[0]
        else:
            number, place, status = folder.number, "host", detached.describe_status(folder)
        row = {
            "run": number,
            "name": str(metadata.get("name", "?")),
            "status": status,
            "processes": str(metadata.get("processes", "?")),
            "where": str(metadata.get(place, "")),
            "launched": time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.launched)),
        }
        rows.append((folder.launched, row))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def prune() -> list[str]:
    """Remove all runs on machines that are over; return which they were."""
    return [f"run {folder.number}" for folder in detached.prune(0.0)]
