"""What workers find in their environment beside what the job says."""

from __future__ import annotations

import os

import pytest

from notebook_accel import probes
from notebook_accel.config.argument_checks import SET_BY_LAUNCHES
from notebook_accel.launch.script import Script
from notebook_accel.launch.worker import environment
from notebook_accel.topology import Topology
from tests.unit.jobs import make_job


@pytest.mark.parametrize(
    ("is_new", "own", "recorded"),
    [
        (True, {}, None),
        (False, {}, "2000"),
        (False, {"TORCH_FR_BUFFER_SIZE": "7"}, "7"),
    ],
)
def test_old_versions_of_torch_record_collectives_unless_the_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch, is_new: bool, own: dict[str, str], recorded: str | None
) -> None:
    monkeypatch.setattr(probes, "at_least", lambda name, version: is_new)
    found = environment.make_environment(make_job(os.getpid), own, {}, is_alone=True)
    assert found.get("TORCH_FR_BUFFER_SIZE") == recorded


def test_nobody_chooses_what_a_launch_sets_for_each_rank() -> None:
    found: set[str] = set()
    for work in (os.getpid, Script(kind="script", words=("train.py",))):
        job = make_job(work)
        found |= environment.list_rank_variables(
            Topology(), job, address="10.0.0.1", port=29500, attempt=0
        ).keys()
    assert found == SET_BY_LAUNCHES.keys()
