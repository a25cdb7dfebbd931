"""What a detached run leaves: written in pieces, thinned where states replace each other, read while it grows."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import notebook_accel
from notebook_accel import events
from notebook_accel.errors import LaunchError
from notebook_accel.events import (
    Event,
    Failure,
    Held,
    Lines,
    Metric,
    Phase,
    Progress,
    Pulse,
    Result,
    Unfinished,
)
from notebook_accel.launch.engines.slurm import recording
from notebook_accel.launch.engines.slurm.recording import Alive, Folder, Over, Reader, Writer
from tests.unit.clock import Clock


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    tmp_path.chmod(0o700)
    return Folder(tmp_path)


def line(text: str, rank: int = 0) -> Lines:
    return Lines(rank=rank, time=1.0, stream="stdout", texts=(text,))


def bar(count: float, finished: bool = False) -> Progress:
    text = f"{count:g} of 9"
    return Progress(
        rank=0, time=1.0, bar=1, description="", count=count, total=9, text=text, finished=finished
    )


def read_all(reader: Reader) -> list[Event]:
    events: list[Event] = []
    while more := reader.read():
        events += more
    return events


def test_events_come_as_they_were_written(folder: Folder) -> None:
    writer, reader = Writer(folder.find_events(0)), Reader(folder)
    assert not reader.has_begun
    value = Result(rank=0, time=1.0, value=b"x" * (recording._READ_BYTES + 5), buffers=[b"12", b""])
    told: list[Event] = [
        line("a"),
        Metric(rank=0, time=1.0, values={"loss": 0.5}, step=1),
        value,
        line("b", 1),
    ]
    writer.write(told[:2])
    assert read_all(reader) == told[:2] and reader.has_begun
    writer.write([*told[2:], Held(rank=0, time=1.0, questions=3)])
    assert read_all(reader) == told[2:], "what is between launcher and rank is left out"
    over = Over(rank=-1, time=2.0, stopped=(1,), was_stopped=True)
    writer.close(over)
    assert read_all(reader) == [over]
    assert read_all(Reader(folder)) == [*told, over], "also by one who comes later"
    assert os.stat(folder.find_events(0)).st_mode & 0o777 == 0o600


def test_of_what_changes_the_newest_state_is_written_now_and_then(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    writer, reader = Writer(folder.find_events(0)), Reader(folder)
    for count in range(100):
        writer.write([bar(count), Pulse(rank=0, time=1.0, steps=count, moment=5.0)])
    assert not read_all(reader)
    clock.now += 1.5
    writer.write([])
    assert read_all(reader) == [bar(99), Pulse(rank=0, time=1.0, steps=99)], "clocks of machines stay there"
    unfinished = Unfinished(rank=0, time=1.0, stream="stdout", text="half a")
    writer.write([bar(100), unfinished, line("half a line"), bar(9, finished=True)])
    clock.now += 20
    writer.write([])
    assert read_all(reader)[:2] == [line("half a line"), bar(9, finished=True)], (
        "they have taken their places"
    )
    clock.now += 36_000
    writer.write([bar(1)])
    clock.now += 9
    writer.write([bar(2)])
    written = read_all(reader)
    clock.now += 9
    writer.write([bar(3)])
    written += read_all(reader)
    assert written == [bar(1), bar(3)], "of a long run every ten seconds"


def test_a_job_that_has_nothing_to_say_says_that_it_can_write(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    writer, reader = Writer(folder.find_events(0)), Reader(folder)
    for _ in range(61):
        writer.write([])
        clock.now += 0.5
    assert [type(event) for event in read_all(reader)] == [Alive] * 3


def test_a_job_that_starts_again_has_another_file(folder: Folder) -> None:
    first, reader = Writer(folder.find_events(0)), Reader(folder)
    first.write([line("a")])
    with open(folder.find_events(0), "ab") as file:
        file.write(b"\0\0")  # its machine was lost in the middle
    assert read_all(reader) == [line("a")]
    second = Writer(folder.find_events(1))
    again = Phase(rank=-1, time=2.0, name="restarting", detail="again")
    second.write([again, line("b")])
    assert read_all(reader) == [again, line("b")]
    assert read_all(Reader(folder)) == [line("a"), again, line("b")]


def test_a_start_that_told_nothing_is_passed_over(folder: Folder) -> None:
    Writer(folder.find_events(0)).write([line("a")])
    Writer(folder.find_events(2)).write([line("c")])
    assert read_all(Reader(folder)) == [line("a"), line("c")]


class FullFile:
    """An error stream on a full disk."""

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    flush: Any = None


def test_a_full_disk_loses_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    writer, reader = Writer(folder.find_events(0)), Reader(folder)
    real = os.write
    room = 10

    def write(file: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(file, data[:room])
        room -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        writer.write([line("a")])
        writer.write([line("b")])
        assert not read_all(reader)
        other = Writer(folder.path / "other")
        patch.setattr(sys, "stderr", FullFile())  # the job's own output goes to the same disk
        other.write([line("b")])
    assert capsys.readouterr().err.count("No space left on device") == 1
    writer.write([line("c")])
    assert read_all(reader) == [line("a"), line("b"), line("c")]


def test_the_end_waits_for_a_full_disk(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader, real, tries = Writer(folder.find_events(0)), Reader(folder), os.write, 0

    def write(file: int, data: bytes) -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(recording, "_SYNC_SECONDS", 0.001)
    writer.close(Over(rank=-1, time=2.0))
    assert read_all(reader) == [Over(rank=-1, time=2.0)]
    tries = -(10**9)
    monkeypatch.setattr(recording, "_LAST_SECONDS", 0.01)
    with pytest.raises(OSError, match=r"\d+ bytes of what the run said could not be written"):
        Writer(folder.find_events(1)).close(Over(rank=-1, time=2.0))


def write_format(path: Path, launched: float = 0.0) -> None:
    told = recording._describe_format() | {recording.LAUNCHED: launched}
    (path / "format").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "by notebook_accel another version, and this is"),
        ("{", "by notebook_accel another version, and this is"),
        ("[]", "by notebook_accel another version, and this is"),
        ('{"version": "0.0.9", "fields": "x"}', "by notebook_accel 0.0.9, and this is"),
        (
            '{"version": "VERSION", "fields": "x"}',
            "by notebook_accel another state of VERSION, and this is VERSION",
        ),
    ],
    ids=["none", "damaged", "odd", "older", "changed"],
)
def test_what_another_version_wrote_is_not_read(folder: Folder, found: str | None, words: str) -> None:
    """The fields of events are pickled by their positions."""
    (folder.path / "job").write_bytes(pickle.dumps({}))
    if found is not None:
        (folder.path / "format").write_text(found.replace("VERSION", notebook_accel.__version__))
    with pytest.raises(LaunchError, match=words.replace("VERSION", notebook_accel.__version__)):
        folder.read_job()


def test_other_fields_are_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recording._describe_format()

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Line(Event):
        text: str
        stream: str

    monkeypatch.setattr(events, "Line", Line)  # the order of its fields differs
    assert recording._describe_format() != before


def test_a_damaged_folder_is_told(folder: Folder) -> None:
    write_format(folder.path)
    (folder.path / "job").write_bytes(b"\x80\x05")
    with pytest.raises(LaunchError, match=r"job cannot be read: \w+Error"):
        folder.read_job()
    (folder.path / "cells").write_bytes(b"\x80\x05")
    folder.install_cells()  # a traceback lacks its lines then


def test_where_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(recording.VARIABLE, "~/runs")
    assert recording.find_root() == tmp_path / "runs"
    monkeypatch.setenv(recording.VARIABLE, "runs")
    assert recording.find_root() == Path.cwd() / "runs"
    monkeypatch.delenv(recording.VARIABLE)
    assert recording.find_root() == tmp_path / ".notebook_accel" / "jobs"


def test_clocks_and_processes_that_only_their_machine_knows_are_left_out(folder: Folder) -> None:
    writer, reader = Writer(folder.find_events(0)), Reader(folder)
    writer.write([Phase(rank=0, time=1.0, name="running", pid=5)])
    writer.write([Failure(rank=0, time=1.0, pid=5, exitcode=-9, moment=3.0, alive=2.0)])
    assert read_all(reader) == [
        Phase(rank=0, time=1.0, name="running"),
        Failure(rank=0, time=1.0, pid=5, exitcode=-9),
    ]


def test_a_stop_is_left_for_the_job(folder: Folder) -> None:
    assert folder.read_stop() is None
    folder.ask_to_stop(30)
    folder.ask_to_stop(0.5)
    assert folder.read_stop() == 0.5
