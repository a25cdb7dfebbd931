"""Which run is that of a job, where clusters and accounts share a folder."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from notebook_accel.devices import CPU
from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.detached import folder as folders
from notebook_accel.launch.engines.slurm import command, job_folder, naming
from notebook_accel.launch.engines.slurm.command import JobState
from notebook_accel.launch.engines.slurm.job_folder import JobFolder


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, JobState]:
    """What SLURM says of jobs; it knows no others. Runs are in the folder `jobs`."""
    states: dict[str, JobState] = {}
    unknown = JobState(job_id="", state="UNKNOWN")
    monkeypatch.setenv(job_folder.VARIABLE, str(tmp_path / "jobs"))
    monkeypatch.setattr(command, "look", lambda job_id, check: states.get(job_id, unknown))
    return states


def write_format(path: Path, launched: float = 0.0, cluster: str = "") -> None:
    told = {folders.LAUNCHED: launched, job_folder.CLUSTER: cluster}
    (path / "run.json").write_text(json.dumps(folders._describe_format() | told))


def make_run(path: Path, launched: float = 0.0, cluster: str = "") -> JobFolder:
    """Return the folder of a run that is recorded, and has no number yet."""
    path.mkdir(mode=0o700, parents=True)
    write_format(path, launched, cluster)
    told = {"function": print, "name": "f", "local_world_size": 1, "device_kind": CPU, "distributed": True}
    (path / "job").write_bytes(pickle.dumps({**told, "options": {folders.LAUNCHED: launched}}))
    return JobFolder(path)


def submit(job_id: str, moment: float, *, restarts: int = 0) -> JobState:
    return JobState(job_id=job_id, state="RUNNING", submitted=moment, restarts=restarts)


def test_clusters_that_share_a_home_keep_their_numbers_apart(
    tmp_path: Path, jobs: dict[str, JobState]
) -> None:
    for launched, cluster in ((5.0, "red"), (6.0, "blue/2")):
        naming.name(make_run(tmp_path / "jobs" / f"run-{cluster[:3]}", launched, cluster), "15")
    naming.name(make_run(tmp_path / "jobs" / "run-more", 4.0, "red"), "14")
    assert naming.find("15", "red").path.name == "run-red"
    assert naming.find("15", "blue/2").path.name == "run-blu"
    assert naming.find_newest("red") == "15"
    with pytest.raises(LaunchError, match=r"no run of job 14 is known of cluster blue/2: .* cluster red"):
        naming.find("14", "blue/2")
    with pytest.raises(
        LaunchError, match=r"no run of a job is known .* there are runs of clusters blue/2, red"
    ):
        naming.find_newest("green")
    with pytest.raises(LaunchError, match="job 15 is known of clusters blue/2, red, and SLURM does not say"):
        naming.find("15", "")
    assert naming.find("14", "").path.name == "run-more", "while SLURM does not answer"


def test_a_cluster_that_was_set_up_anew_has_other_jobs(tmp_path: Path, jobs: dict[str, JobState]) -> None:
    jobs["15"] = submit("15", 1000.0)
    old = make_run(tmp_path / "jobs" / "run-old", 5.0, "red")
    naming.name(old, "15")
    assert naming.find("15", "red").path == old.path
    jobs["15"] = submit("15", 3000.0)
    with pytest.raises(LaunchError, match=r"job 15 of cluster red .*run-old is of another job 15, submitted"):
        naming.find("15", "red")
    new = make_run(tmp_path / "jobs" / "run-new", 6.0, "red")
    naming.name(new, "15")
    assert naming.find("15", "red").path == new.path, "the number is that of the newer run"
    jobs["15"] = submit("15", 4000.0, restarts=1)
    naming.name(new, "15")
    assert new.read_submission() == 3000.0 and naming.find("15", "red").path == new.path, "queued again"
    del jobs["15"]
    assert naming.find("15", "red").path == new.path, "SLURM has forgotten it"


def test_what_does_not_answer_hides_no_run(
    tmp_path: Path, jobs: dict[str, JobState], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> JobState:
        raise LaunchError("unable to contact slurmctld")

    jobs["15"] = submit("15", 1000.0)
    naming.name(make_run(tmp_path / "jobs" / "run", 5.0, "red"), "15")
    monkeypatch.setattr(command, "look", fail)
    monkeypatch.setattr(command, "ask", fail)
    assert naming.find_cluster() == "" and naming.find("15", "red").path.name == "run"


def test_only_folders_of_this_user_are_read(
    tmp_path: Path, jobs: dict[str, JobState], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=r"no run of job 5 is known in .*: there is none"):
        naming.find("5", "")
    with pytest.raises(LaunchError, match=r"no run of a job is known in"):
        naming.find_newest("")
    (tmp_path / "jobs" / "run").mkdir(parents=True)
    naming.name(JobFolder(tmp_path / "jobs" / "run"), "4")
    with pytest.raises(LaunchError, match=r"/run was written by notebook_accel another"):
        naming.find(naming.find_newest(""), "").read_job()
    naming.name(JobFolder(tmp_path / "jobs" / "run"), "4")  # the number is given again
    assert naming.find("4", "").path == tmp_path / "jobs" / "run"
    with pytest.raises(LaunchError, match=r"there are 4$"):
        naming.find("5", "")
    for number, launched in (("4", 5.0), ("3", 6.0)):
        naming.name(make_run(tmp_path / "jobs" / f"run{number}", launched), number)
    (tmp_path / "jobs" / "7").symlink_to("gone")
    assert naming.find_newest("") == "3", "SLURM gives numbers again: the time counts"
    (tmp_path / "jobs" / "damaged").mkdir(mode=0o700)
    write_format(tmp_path / "jobs" / "damaged", 7.0)
    (tmp_path / "jobs" / "damaged" / "job").write_bytes(b"no job")
    naming.name(JobFolder(tmp_path / "jobs" / "damaged"), "8")
    with pytest.raises(LaunchError, match=r"damaged/job cannot be read"):
        naming.find(naming.find_newest(""), "").read_job()
    (tmp_path / "jobs" / "damaged" / "run.json").write_text('{"launched": "odd"}')
    assert naming.find_newest("") == "3"
    naming.name(JobFolder(tmp_path / "jobs" / "run"), "4")
    (tmp_path / "jobs" / "run").chmod(0o770)
    with pytest.raises(LaunchError, match="is not yours alone, and what is in it would be run"):
        naming.find("4", "")
    (tmp_path / "jobs" / "run").chmod(0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(LaunchError, match="is not yours alone"):
        naming.find("4", "")
