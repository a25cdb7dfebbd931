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
from .engines.slurm import command
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
    hosts, python, engine = (options[name] for name in ("hosts", "python", "engine"))
    folder = _open_folder(run, hosts, python, engine) if hosts or engine else _find_folder(run)
    folder.install_cells()
    try:
        recorded = folder.read_job()
    except LaunchError:
        folder.close()
        raise
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


def _open_folder(run: str | None, hosts: Any, python: Any, engine: Any) -> Folder:
    """Return the folder of a run on a host."""
    from .engines.ssh.engine import SshEngine  # only now: it imports torch

    if engine is not None and not isinstance(engine, SshEngine):
        raise TypeError(
            f"engine={engine!r}: an SshEngine is needed, for a run on hosts; leave it out for others"
        )
    return (engine or SshEngine()).open_folder(run, hosts, python)


def _find_folder(run: str | None) -> Folder:
    """Return the folder of a run: of several with one name, or number of a job, the newest."""
    here, others = _list_here()
    found = [each for each in here if run is None or run in (each.number, each.name)]
    if run is not None and run.isdecimal() and len({bool(each.job_id) for each in found}) > 1:
        raise LaunchError(
            f"{run} is the number of a run on this machine and of a job of SLURM: attach to it by its name"
        )
    if found:
        return found[-1]
    known = [f"{each.title.removeprefix('run ')} ({each.name})" for each in here]
    there = f"there are {', '.join(known[-_MOST_TOLD:])}" if known else "there is none"
    which = "no run" if run is None else f"no run {run}"
    text = f"{which} is known in {detached.find_state()}, {there}: launch one with detach=True"
    elsewhere = sorted({each.cluster for each in others if run is None or run in (each.number, each.name)})
    raise LaunchError(
        text + (f"; cluster {', '.join(elsewhere)} has one: attach to it there" if elsewhere else "")
    )


def _list_here() -> tuple[list[Folder], list[Folder]]:
    """Return the folders of runs, oldest first: those that can be attached to here, and those of other clusters.

    Clusters that share a home folder give the same numbers to their jobs.
    """
    every = detached.list_all()
    cluster = command.find_cluster() if any(each.cluster for each in every) else ""
    others = [each for each in every if cluster and each.cluster not in ("", cluster)]
    return [each for each in every if each not in others], others


def list_runs() -> list[dict[str, str]]:
    """Return what is known of all runs that were launched with `detach=True`, oldest first: texts by heading."""
    return [_describe(each) for each in _list_here()[0]]


def _describe(folder: Folder) -> dict[str, str]:
    metadata = folder.read_metadata()
    return {
        "run": folder.title.removeprefix("run "),
        "name": folder.name,
        "status": detached.describe_status(folder),
        "processes": str(metadata.get("processes", "?")),
        "where": folder.cluster or str(metadata.get("host", "")),
        "launched": time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.launched)),
    }


def prune() -> list[str]:
    """Remove all runs that are over; return which they were."""
    return detached.prune(0.0)
