"""Which recorded run is that of a job: clusters that share a home folder give the same numbers to their jobs."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from ....errors import LaunchError
from . import command
from .job_folder import JobFolder, find_root

_AT: Final = "@"  # between a job's number and the cluster's name, in the name of a link
_MOST_TOLD: Final = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A link to the folder of a run.

    Attributes:
        link: its path.
        job_id: number of the job.
        cluster: name of the cluster, empty where nobody knows it.
    """

    link: Path
    job_id: str
    cluster: str


def find_cluster() -> str:
    """Return the name of the cluster whose commands are used here; empty where SLURM does not say it."""
    try:
        return command.find_cluster(lambda: None)
    except (LaunchError, OSError):
        return ""


def name(folder: JobFolder, job_id: str) -> None:
    """Let a run be found by the number of its job on its cluster; an older run of that number has it no longer.

    Args:
        folder: of the run.
        job_id: the number.
    """
    root, cluster = folder.path.parent, folder.cluster  # a job may not have the variables of its notebook
    end = f"{_AT}{quote(cluster, safe='')}" if cluster else ""
    link, new = root / f"{job_id}{end}", root / f"{job_id}-{secrets.token_hex(4)}"
    new.symlink_to(folder.path.name)
    os.replace(new, link)
    state = None if folder.read_submission() is not None else _look(job_id)
    # a job that is queued again gets another time
    if state is not None and state.submitted is not None and not state.restarts:
        folder.note_submission(state.submitted)


def find_job(run: str | None) -> JobFolder:
    """Return the folder of a run.

    Args:
        run: the number of its job, or its name; None is the one that was submitted last.

    Raises:
        LaunchError: nothing is known of it.
    """
    cluster = find_cluster()
    if run is None:
        run = find_newest(cluster)
    elif not run.isdecimal():
        named = [each.number for each in list_jobs(cluster) if each.read_metadata().get("name") == run]
        if not named:
            raise LaunchError(f"no run with the name {run!r} is known")
        run = named[-1]
    return find(run, cluster)


def list_jobs(cluster: str) -> list[JobFolder]:
    """Return the folders of runs of jobs, oldest first.

    Args:
        cluster: name of theirs; empty where SLURM does not say it.
    """
    found: list[JobFolder] = []
    for entry in _list_entries():
        with contextlib.suppress(LaunchError):
            if _may_be_of(entry, cluster):
                found.append(_open(entry))
    return sorted(found, key=lambda each: (each.launched, _as_number(each.number)))


def _open(entry: _Entry) -> JobFolder:
    folder = JobFolder(entry.link.resolve())
    folder.number = entry.job_id
    return folder


def find(job_id: str, cluster: str) -> JobFolder:
    """Return the folder of a job.

    Args:
        job_id: its number.
        cluster: name of the cluster; empty where SLURM does not say it.

    Raises:
        LaunchError: nothing is known of it, or what is known is of another job.
    """
    entries, root = _list_entries(), find_root()
    same = [entry for entry in entries if entry.job_id == job_id]
    found = [entry for entry in same if _may_be_of(entry, cluster)]
    if not found and same:
        raise LaunchError(
            f"no run of job {job_id} is known of cluster {cluster}: the one in {root} is of "
            f"{_name_clusters(same)}, attach to it there"
        )
    if not found:
        known = sorted({entry.job_id for entry in entries if _may_be_of(entry, cluster)}, key=_as_number)
        there = f"there are {', '.join(known[-_MOST_TOLD:])}" if known else "there is none"
        raise LaunchError(f"no run of job {job_id} is known in {root}: {there}")
    if len(found) > 1 and not cluster:
        raise LaunchError(
            f"job {job_id} is known of {_name_clusters(found)}, and SLURM does not say which cluster this is"
        )
    folder = _open(max(found, key=lambda entry: bool(entry.cluster)))
    if cluster:
        _check_submission(folder, job_id, cluster)
    return folder


def find_newest(cluster: str) -> str:
    """Return the number of the job that was submitted last.

    Args:
        cluster: name of the cluster; empty where SLURM does not say it.

    Raises:
        LaunchError: none is known.
    """
    if jobs := list_jobs(cluster):
        return jobs[-1].number
    entries = _list_entries()
    others = f"; there are runs of {_name_clusters(entries)}" if entries else ""
    raise LaunchError(
        f"no run of a job is known in {find_root()}: launch one with engine='slurm' and detach=True{others}"
    )


def _list_entries() -> list[_Entry]:
    """Return the links to runs."""
    parts = [(each, *each.name.partition(_AT)) for each in find_root().glob("*") if each.is_symlink()]
    return [_Entry(link=link, job_id=job_id, cluster=unquote(end)) for link, job_id, _, end in parts]


def _may_be_of(entry: _Entry, cluster: str) -> bool:
    return not (entry.cluster and cluster) or entry.cluster == cluster


def _name_clusters(entries: list[_Entry]) -> str:
    names = sorted({entry.cluster for entry in entries if entry.cluster})
    return f"{'cluster' if len(names) == 1 else 'clusters'} {', '.join(names)}"


def _check_submission(folder: JobFolder, job_id: str, cluster: str) -> None:
    """Raise LaunchError where SLURM has a job of this number that is not the one of the run."""
    recorded, state = folder.read_submission(), _look(job_id)
    if recorded is None or state is None or state.submitted is None:
        return
    # one that is queued again has a later time
    if state.submitted == recorded or (state.restarts and state.submitted > recorded):
        return
    raise LaunchError(
        f"job {job_id} of cluster {cluster} was submitted at {_describe_time(state.submitted)}, and the run in "
        f"{folder.path} is of another job {job_id}, submitted at {_describe_time(recorded)}"
    )


def _look(job_id: str) -> command.JobState | None:
    """Return how a job stands; None where SLURM does not answer."""
    with contextlib.suppress(LaunchError, OSError):
        return command.look(job_id, lambda: None)
    return None


def _describe_time(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _as_number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else 0, text)
