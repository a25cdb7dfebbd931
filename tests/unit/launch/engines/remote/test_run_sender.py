"""What a host sends of a run that outlives its notebook."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from notebook_accel.events import Event, Lines, Result
from notebook_accel.launch.engines.detached import folder as folders
from notebook_accel.launch.engines.detached.folder import Folder
from notebook_accel.launch.engines.detached.recording import Over, Writer
from notebook_accel.launch.engines.remote.messages import Standing
from notebook_accel.launch.engines.remote.run_sender import RunSender, find_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path))
    folder = folders.make()
    folder.add_metadata(name="train", host="elsewhere")
    for name in (folders.JOB, folders.CELLS):
        folder.write(name, name)
    return folder


def read(sender: RunSender) -> Sequence[Event]:
    while not (events := sender.read(1.0)):
        pass
    return events


def test_events_come_in_order_and_then_how_it_stands(folder: Folder) -> None:
    sender, writer = RunSender(folder), Writer(folder.recording, 0)
    assert [type(event) for event in read(sender)] == [Standing]
    written: list[Event] = [
        Lines(rank=0, time=1.0, stream="stdout", texts=("a", "b")),
        Result(rank=0, time=2.0, value=b"v" * 5000),
    ]
    writer.write(written)
    assert read(sender) == written
    folder.ask_to_stop(5.0)
    (standing,) = read(sender)
    assert isinstance(standing, Standing) and (standing.is_held, standing.stop) == (True, 5.0)
    writer.close(Over(rank=-1, time=4.0))
    assert read(sender) == [Over(rank=-1, time=4.0)]


def test_a_run_is_found_by_number_and_name(folder: Folder) -> None:
    second, job = folders.make(), folders.make(for_job=True)
    second.add_metadata(name="train", launched="1")
    job.add_metadata(name="train", launched="2", job="17")
    found = [find_run(run) for run in (None, "1", "train", "17", "other")]
    assert [each and each.number for each in found] == ["2", "1", "2", None, None], "a job is SLURM's to show"
    described = RunSender(folder).describe()
    assert (described.number, described.path, set(described.files)) == (
        "1",
        str(folder.path),
        {"job", "cells"},
    )
