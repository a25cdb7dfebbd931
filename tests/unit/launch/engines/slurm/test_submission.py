"""What a job runs that holds nodes: it lasts as long as an agent does."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from notebook_accel.launch.engines.slurm.submission import make_hold


def hold(path: Path, patience: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", make_hold(str(path), patience, 0.1)])


def test_a_job_without_agents_ends(tmp_path: Path) -> None:
    assert hold(tmp_path / "lock", 1).wait(60) == 0


def test_a_job_lasts_as_long_as_an_agent_does(tmp_path: Path) -> None:
    agents = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600) for _ in range(2)]
    for agent in agents:
        fcntl.flock(agent, fcntl.LOCK_SH)
    process = hold(tmp_path / "lock", 60)
    os.close(agents[0])
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    os.close(agents[1])
    assert process.wait(60) == 0 and not (tmp_path / "lock").exists()
