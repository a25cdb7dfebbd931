"""How a job is waited for, and how many GPUs its options name."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from notebook_accel.errors import LaunchError
from notebook_accel.launch.engines.remote.client import Wanted
from notebook_accel.launch.engines.slurm import allocation, command, engine
from notebook_accel.launch.engines.slurm.command import JobState
from notebook_accel.launch.engines.slurm.submission import Wish


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


def test_a_job_that_runs_at_the_first_look_is_told_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    runs = JobState(job_id="3", state="RUNNING", node_list="n[1-2]")
    monkeypatch.setattr(command, "look", lambda job_id, check: runs)
    monkeypatch.setattr(command, "list_nodes", lambda state, check: ["n1", "n2"])
    monkeypatch.setattr(command, "start_watcher", lambda job_id: None)
    monkeypatch.setattr(allocation.submission, "submit", lambda wish: ("3", ""))
    wish = Wish(num_nodes=2, ranks_per_node=1, options={}, python="", is_requeued=False, name="f")
    job = allocation.Allocation("", wish)
    for _ in range(2):  # the second time for the next launch, after another look
        assert job.wait(shown.append) == ["n1", "n2"]
        job.look(lambda: None)
    (told,) = filter(None, shown)
    assert re.match(r"Job 3: RUNNING on n1, n2, after \d+ s in the queue\.", told)


def test_slurm_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(job_id: str, check: Any) -> JobState:
        raise LaunchError("unable to contact slurmctld")

    monkeypatch.setattr(command, "look", look)
    monkeypatch.setattr(allocation, "_OUTAGE_SECONDS", 0.3)
    with pytest.raises(LaunchError, match="unable to contact"):
        allocation.Allocation("3").wait(lambda text: None)


class FakePool:
    """A pool whose connections need no network."""

    def open(self, *_: Any) -> list[Any]:
        return []

    def take_kept(self, key: object) -> None: ...
    def make_room(self, who: object, kind: type) -> None: ...
    def end_wait(self, who: object) -> None: ...


def make_nodes(
    monkeypatch: pytest.MonkeyPatch, states: list[JobState], pool: type[FakePool] = FakePool
) -> allocation.SlurmNodes:
    """Return the nodes of a job; SLURM says one of the states at each question, and the last one again and again."""
    monkeypatch.setattr(
        command, "look", lambda job_id, check: states.pop(0) if len(states) > 1 else states[0]
    )
    monkeypatch.setattr(command, "list_nodes", lambda state, check: ["n1"])
    monkeypatch.setattr(command, "start_watcher", lambda job_id: None)
    monkeypatch.setattr(allocation, "get_pool", pool)
    monkeypatch.setattr(allocation.submission, "cancel", lambda job_id: None)
    monkeypatch.setattr(allocation.submission, "submit", lambda *_: ("3", None))
    wish = Wish(num_nodes=1, ranks_per_node=1, options={}, python=None, is_requeued=True, name="f")
    return allocation.SlurmNodes(wish, "", 0.0, Wanted.here(), use_cpu=True)


def make_running_nodes(monkeypatch: pytest.MonkeyPatch, *later: JobState) -> allocation.SlurmNodes:
    """Return the nodes of a job whose ranks have run, and of which SLURM says this from now on."""
    states = [JobState(job_id="3", state="RUNNING", node_list="n1")]
    nodes = make_nodes(monkeypatch, states)
    assert nodes.open(lambda text: None) == []
    states[:] = later
    return nodes


@pytest.mark.parametrize(("left", "is_taken"), [(500.0, True), (20.0, False)])
def test_a_job_whose_time_is_nearly_over_is_none_for_the_next_launch(
    monkeypatch: pytest.MonkeyPatch, left: float, is_taken: bool
) -> None:
    """Its function would be told to stop at once; nor does such a job rest."""
    now = time.time()
    state = JobState(job_id="3", state="RUNNING", node_list="n1", start=now - 1000, end=now + left)
    resting: list[Any] = [allocation.Allocation("2")]

    class Pool(FakePool):
        def take_kept(self, key: object) -> Any:
            return resting.pop() if resting else None

        def keep(self, key: object, kept: object) -> None:
            resting.append(kept)

    nodes = make_nodes(monkeypatch, [state], Pool)
    nodes._notice, nodes._keep = 60.0, 100.0
    nodes.open(lambda text: None)
    assert nodes.allocation is not None and nodes.allocation.job_id == ("2" if is_taken else "3")
    nodes._allocation = allocation.Allocation("", nodes._wish)
    nodes._allocation.look(lambda: None)
    nodes.give_back(is_stopped=False)
    assert len(resting) == int(is_taken)


def test_a_job_that_somebody_cancels_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM says first that the job is ending, and how only some time later."""
    ending = JobState(job_id="3", state="COMPLETING")
    nodes = make_running_nodes(monkeypatch, ending, ending, JobState(job_id="3", state="CANCELLED"))
    shown: list[str] = []
    assert nodes.find_obstacle(shown.append) == "job 3 was cancelled from outside while its ranks ran"
    assert any("is ending" in text for text in shown)


def test_a_job_that_is_queued_again_may_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = JobState(job_id="3", state="COMPLETING")
    waiting = JobState(job_id="3", state="PENDING", reason="BeginTime")
    nodes = make_running_nodes(monkeypatch, ending, waiting, JobState(job_id="3", state="CANCELLED"))
    assert nodes.find_obstacle(lambda text: None) == ""
    with pytest.raises(LaunchError, match=r"job 3 has ended: CANCELLED$"):
        nodes.open(lambda text: None)


def test_a_job_is_withdrawn_only_where_its_ranks_have_never_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was preempted waits in the queue as well, and has begun all the same."""
    waiting = JobState(job_id="3", state="PENDING", reason="Resources")

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    nodes = make_nodes(monkeypatch, [waiting])
    with pytest.raises(KeyboardInterrupt):
        nodes.open(interrupt)
    assert (nodes.withdrawn, nodes.job_id) == ("3", "3")
    nodes = make_running_nodes(monkeypatch, waiting)
    with pytest.raises(KeyboardInterrupt):
        nodes.open(interrupt)
    assert (nodes.withdrawn, nodes.job_id) == ("", "3")


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
