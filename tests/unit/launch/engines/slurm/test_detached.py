"""Watching a job that goes on without its notebook: what it says at its end, and when a job ended that says nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accel.events import Event, Lines, Notice
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.detached.folder import Folder
from notebook_accel.launch.engines.detached.recording import Over, Writer
from notebook_accel.launch.engines.slurm import command, detached
from notebook_accel.launch.engines.slurm.command import JobState
from notebook_accel.launch.supervise.control import Control
from notebook_accel.stream.record import RunRecord

LONG_AGO = 1_700_000_000.0
LINE = Lines(rank=0, time=LONG_AGO, stream="stdout", texts=("a",))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    path = tmp_path / "job-0"
    path.mkdir(mode=0o700)
    folder = Folder(path)
    folder.add_metadata(job="7")
    return folder


@pytest.fixture
def writer(folder: Folder) -> Iterator[Writer]:
    """What a job writes with that has written a line."""
    writer = Writer(folder.recording, 0)
    writer.write([LINE])
    yield writer
    os.close(writer._file)


def watch(state: JobState, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, list[str]]:
    told: list[Event] = []
    monkeypatch.setattr(command, "look", lambda job_id, check: state)
    outcome = detached.JobWatch(folder, RunRecord(), told.extend, Control()).run()
    return outcome, [event.text for event in told if isinstance(event, Notice)]


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        (JobState(job_id="7", state="CANCELLED", end=LONG_AGO + 60), LONG_AGO + 60),
        (JobState(job_id="7", state="UNKNOWN"), LONG_AGO),
    ],
)
def test_a_job_that_ended_long_ago_without_a_word(
    state: JobState, ended: float, folder: Folder, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has written is there, so nothing is waited for, and its time does not grow."""
    monkeypatch.setattr(detached, "_LAST_SECONDS", 1000.0)
    outcome, notices = watch(state, folder, monkeypatch)
    assert f"job 7 has ended: {state.state}" in str(outcome.error) and outcome.ended == ended
    assert notices == [f"Job 7 is over: {state.state}."]


def test_the_last_words_of_a_job_that_has_just_ended_are_waited_for(
    folder: Folder, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detached, "_LAST_SECONDS", 3.0)
    began, end = time.monotonic(), time.time() + 3600  # still fresh where this process stands still for long
    outcome, notices = watch(JobState(job_id="7", state="FAILED", end=end), folder, monkeypatch)
    assert outcome.ended == end and time.monotonic() - began > 2.5
    assert notices == ["Job 7 is over: FAILED. Its last words are waited for."]


def test_a_job_that_said_that_it_is_ended_has_no_last_words(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(folder.recording, 0)
    writer.write([LINE])
    writer.leave()
    monkeypatch.setattr(detached, "_LAST_SECONDS", 1000.0)
    end = time.time() + 3600  # still fresh where this process stands still for long
    outcome, notices = watch(JobState(job_id="7", state="CANCELLED", end=end), folder, monkeypatch)
    assert "job 7 has ended: CANCELLED" in str(outcome.error) and notices == ["Job 7 is over: CANCELLED."]


def test_a_run_that_was_seen_going_on_is_said_to_be_over(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(folder.recording, 0)
    writer.write([LINE])
    state = JobState(job_id="7", state="RUNNING", node_list="n1")

    def look(job_id: str, check: object) -> JobState:
        writer.close(Over(rank=-1, time=LONG_AGO + 1))
        return state

    told: list[Event] = []
    monkeypatch.setattr(command, "look", look)
    outcome = detached.JobWatch(folder, RunRecord(), told.extend, Control()).run()
    assert outcome.ended == LONG_AGO + 1 and outcome.error is None
    assert [event.text for event in told if isinstance(event, Notice)] == [
        "Job 7: RUNNING on n1. It goes on without this notebook: notebook_accel.attach(7) shows it again.",
        "Job 7 is over.",
    ]
