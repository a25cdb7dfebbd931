"""Which run is attached to, where clusters and machines share a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch import attaching
from notebook_accel.launch.engines.detached import folder as folders
from notebook_accel.launch.engines.slurm import command


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which runs are; the cluster of this machine is `red`."""
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path))
    monkeypatch.setattr(command, "find_cluster", lambda: "red")
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def add(path: Path, launched: float, name: str = "train", **told: str) -> Path:
    path.mkdir(mode=0o700)
    (path / "run.json").write_text(json.dumps({"launched": launched, "name": name, **told}))
    return path


def test_the_newest_of_a_name_or_number_counts(runs: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"no run is known in .*, there is none: launch one with detach=True"
    ):
        attaching._find_folder(None)
    add(runs / "job-a", 1.0, job="15", cluster="red")
    newer = add(runs / "job-b", 2.0, job="15", cluster="red")
    first, last = add(runs / "1", 3.0), add(runs / "2", 5.0, name="other")
    add(runs / "job-c", 6.0, cluster="red")  # is being submitted
    assert attaching._find_folder("15").path == newer, "a cluster that was set up anew counts from the start"
    assert attaching._find_folder("1").path == attaching._find_folder("train").path == first
    assert attaching._find_folder(None).path == last
    with pytest.raises(
        LaunchError, match=r"no run 7 .* there are job 15 \(train\), .*, 1 \(train\), 2 \(other\)"
    ):
        attaching._find_folder("7")
    add(runs / "15", 4.0)
    with pytest.raises(LaunchError, match="15 is the number of a run on this machine and of a job of SLURM"):
        attaching._find_folder("15")


def test_clusters_that_share_a_home_keep_their_numbers_apart(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    red = add(runs / "job-a", 1.0, job="15", cluster="red")
    blue = add(runs / "job-b", 2.0, job="15", cluster="blue")
    add(runs / "job-c", 3.0, job="16", cluster="blue")
    assert attaching._find_folder("15").path == attaching._find_folder(None).path == red
    assert [row["where"] for row in attaching.list_runs()] == ["red"]
    with pytest.raises(LaunchError, match=r"no run 16 .*; cluster blue has one: attach to it there"):
        attaching._find_folder("16")
    monkeypatch.setattr(command, "find_cluster", lambda: "")
    assert attaching._find_folder("15").path == blue, "while SLURM does not answer"
