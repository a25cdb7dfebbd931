"""The folder of a detached run: who may read it, whether it lives, how it is stopped and removed."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import socket
import time
from pathlib import Path

import pytest

import notebook_accel
from notebook_accel import events
from notebook_accel.errors import LaunchError
from notebook_accel.events import Event
from notebook_accel.launch.engines.detached import folder as folders
from notebook_accel.launch.engines.detached.folder import Folder
from notebook_accel.launch.engines.detached.recording import Over, Writer


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    tmp_path.chmod(0o700)
    return Folder(tmp_path)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(folders.VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def write_told(folder: Folder, **more: object) -> None:
    told = {**folders._describe_format(), folders.LAUNCHED: 0.0, **folders.describe_here(), **more}
    (folder.path / "run.json").write_text(json.dumps(told))


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
        (folder.path / "run.json").write_text(found.replace("VERSION", notebook_accel.__version__))
    with pytest.raises(LaunchError, match=words.replace("VERSION", notebook_accel.__version__)):
        folder.read_job()


def test_other_fields_are_another_format(monkeypatch: pytest.MonkeyPatch) -> None:
    before = folders._describe_format()

    @dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
    class Line(Event):
        text: str
        stream: str

    monkeypatch.setattr(events, "Line", Line)  # the order of its fields differs
    assert folders._describe_format() != before


def test_a_damaged_folder_is_told(folder: Folder) -> None:
    write_told(folder)
    (folder.path / "job").write_bytes(b"\x80\x05")
    with pytest.raises(LaunchError, match=r"job cannot be read: \w+Error"):
        folder.read_job()
    (folder.path / "cells").write_bytes(b"\x80\x05")
    folder.install_cells()  # a traceback lacks its lines then


def test_where_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv(folders.VARIABLE, "~/runs")
    assert folders.find_state() == tmp_path / "runs"
    monkeypatch.setenv(folders.VARIABLE, "runs")
    assert folders.find_state() == Path.cwd() / "runs"
    monkeypatch.delenv(folders.VARIABLE)
    assert folders.find_state() == tmp_path / ".local" / "state" / "notebook_accel"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert folders.find_state() == tmp_path / "xdg" / "notebook_accel"


def test_a_stop_is_left_for_the_job(folder: Folder) -> None:
    assert folder.read_stop() is None
    folder.ask_to_stop(30)
    folder.ask_to_stop(0.5)
    assert folder.read_stop() == 0.5
    (folder.path / "stop-soon").touch()  # not ours
    assert folder.read_stop() == 0.5


def test_a_stop_needs_no_room(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.ask_to_stop(2)
    assert [path.stat().st_size for path in folder.path.iterdir()] == [0]


def test_each_run_has_a_number_and_a_folder_of_its_own(state: Path) -> None:
    first, second = folders.make(), folders.make()
    assert (first.path.name, second.path.name) == ("1", "2")
    assert {os.stat(path).st_mode & 0o777 for path in (state / "runs", first.path)} == {0o700}
    first.remove()
    third = folders.make()
    assert third.number == "3"
    third.remove()
    assert folders.make().number == "4", "no number is given twice"
    second.path.chmod(0o770)
    with pytest.raises(LaunchError, match="is not yours alone"):
        Folder(second.path)
    assert [each.path.name for each in folders.list_all()] == ["4"]


def test_the_lock_says_whether_it_lives(folder: Folder) -> None:
    write_told(folder)
    assert folder.is_held, "it is just being launched"
    lock = folder.hold()
    copy = os.dup(lock.fd)  # as a driver has it that was given it
    lock.close()
    assert folder.is_held
    with pytest.raises(OSError):
        folder.hold()
    os.close(copy)
    assert not folder.is_held and not folder.has_restarted


def test_a_run_of_another_machine_lives_while_it_writes(folder: Folder) -> None:
    """Network file systems may tell other machines nothing of locks."""
    write_told(folder, host="elsewhere")
    folder.hold().close()
    Writer(folder.recording, 0).close(Over(rank=-1, time=1.0))
    assert folder.is_held and not folder.has_restarted
    for path in (folder.path, folder.recording.find(0, 0)):
        os.utime(path, (1.0, 1.0))
    assert not folder.is_held


def test_a_machine_that_was_started_again_is_known(folder: Folder) -> None:
    write_told(folder, boot="another")
    folder.hold().close()
    assert folder.has_restarted and not folder.is_held


def test_what_is_over_is_removed_after_a_time(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    living, ended, lost, new = (folders.make() for _ in range(4))
    for each in (living, ended, lost, new):
        write_told(each)
        each.hold().close()
    ended.note_end("done")
    new.note_end("failed")
    end = ended.path / "end.json"
    end.write_text(json.dumps({"status": "done", "ended": time.time() - 31 * 86_400}))
    os.utime(lost.path, (1.0, 1.0))
    os.utime(living.path, (1.0, 1.0))
    lock = living.hold()
    assert [folders.describe_status(each) for each in (living, ended, lost, new)] == [
        "running",
        "done",
        "lost",
        "failed",
    ]
    assert folders.prune() == ["run 2", "run 3"]
    assert folders.prune(0.0) == ["run 4"]
    lock.close()
    monkeypatch.setenv(folders.DAYS_VARIABLE, "soon")
    with pytest.raises(LaunchError, match=r"NOTEBOOK_ACCEL_STATE_DAYS='soon': a number of days is needed"):
        folders.prune()


def test_devices_that_living_runs_hold_are_known(state: Path) -> None:
    living, over, elsewhere = (folders.make() for _ in range(3))
    write_told(living, name="train", holds=["0", "2"])
    write_told(over, name="train", holds=["1"])
    over.hold().close()
    write_told(elsewhere, name="train", holds=["3"], host="elsewhere")
    locks = [living.hold(), elsewhere.hold()]
    holders = folders.find_holders()
    for lock in locks:
        lock.close()
    assert holders == dict.fromkeys(["0", "2"], "run 1 (train), see notebook_accel.attach(1)")


def test_no_fork_of_its_holder_keeps_the_lock(folder: Folder) -> None:
    write_told(folder)
    lock = folder.hold()
    child, ours = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        child.send(b"x")
        child.recv(1)
        os._exit(0)
    with child, ours:
        ours.recv(1)  # it has begun
        lock.close()
        is_held = folder.is_held
        ours.send(b"x")
        os.waitpid(pid, 0)
    assert not is_held


def test_what_is_just_made_is_not_removed(state: Path) -> None:
    folder = folders.make()
    assert folders.prune(0.0) == [] and folder.path.exists()


def test_what_ran_elsewhere_is_kept_a_day(state: Path) -> None:
    folder = folders.make()
    write_told(folder, host="elsewhere")
    folder.hold().close()
    os.utime(folder.path, (time.time() - 3600, time.time() - 3600))
    assert folders.prune(0.0) == []
    os.utime(folder.path, (time.time() - 90_000, time.time() - 90_000))
    assert folders.prune(0.0) == ["run 1"]


def test_a_job_of_slurm_is_kept_while_it_may_wait(state: Path) -> None:
    """Its folder gets its number once it is submitted; nobody holds a lock of it."""
    folder = folders.make(for_job=True)
    write_told(folder, host="", cluster="red")
    assert folders.list_all() == []
    folder.add_metadata(job="4711")
    (found,) = folders.list_all()
    assert (found.title, found.cluster, found.path) == ("job 4711", "red", folder.path)
    assert folders.describe_status(found) == "submitted"
    writer = Writer(folder.recording, 0)
    assert folders.describe_status(found) == "running"
    writer.close(Over(rank=-1, time=1.0))
    for path in (folder.path, folder.recording.find(0, 0)):
        os.utime(path, (time.time() - 40 * 86_400,) * 2)
    assert folders.prune() == [] and folders.describe_status(found) == "submitted", "it may be queued again"
    folder.note_end("done")
    os.utime(folder.path, (1.0, 1.0))
    assert folders.describe_status(found) == "done"
    assert folders.prune() == [], "it has just ended"
