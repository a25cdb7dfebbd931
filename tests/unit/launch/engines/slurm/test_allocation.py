"""How a job is waited for, and how many GPUs its options name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.slurm import allocation, command, engine
from notebook_accel.launch.engines.slurm.command import JobState


def test_a_job_in_the_queue_stays_while_slurm_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pending = JobState(job_id="3", state="PENDING", reason="Resources")
    answers: list[Any] = [pending, LaunchError("unable to contact slurmctld"), pending]
    answers.append(JobState(job_id="3", state="RUNNING", node_list="n1"))

    def look(job_id: str, check: Any) -> JobState:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, JobState)
        return answer

    shown: list[str] = []
    monkeypatch.setattr(command, "look", look)
    monkeypatch.setattr(command, "list_nodes", lambda state, check: ["n1"])
    assert allocation.Allocation("3").wait(shown.append) == ["n1"]
    told = list(dict.fromkeys(text.removesuffix("\n") for text in shown if text))
    assert ["unable to contact slurmctld" in text for text in told] == [False, True]
    assert all("PENDING (Resources)" in text for text in told)


def test_slurm_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(job_id: str, check: Any) -> JobState:
        raise LaunchError("unable to contact slurmctld")

    monkeypatch.setattr(command, "look", look)
    monkeypatch.setattr(allocation, "_OUTAGE_SECONDS", 0.3)
    with pytest.raises(LaunchError, match="unable to contact"):
        allocation.Allocation("3").wait(lambda text: None)


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 1),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_node": "a100:4"}, 4),
        ({"gpus_per_node": "a100:2,v100:2"}, 4),
        ({"gres": "gpu"}, 1),
        ({"gres": "gpu:4(S:0)"}, 4),
        ({"gres": "gpu:a100:4,lustre:1"}, 4),
        ({"gres": "lustre:3"}, 1),
    ],
)
def test_gpus_of_a_node(options: Mapping[str, Any], number: int) -> None:
    assert engine._count_gpus(options) == number
