"""Folders of sockets that killed runs leave are found and removed; those in use are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import process
from multiprocessing.connection import Listener
from pathlib import Path

import psutil
import pytest

from notebook_accel import owners
from notebook_accel.launch import leftovers
from tests.stopping import stop
from tests.structure.source import ROOT
from tests.unit.clock import wait_until

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")

LAUNCHER = """
import os, sys, time
from multiprocessing.connection import Listener
from notebook_accel import notebook_launcher


def work(path):
    listener = Listener(family="AF_UNIX")
    if os.environ["RANK"] == "0":
        open(path, "w").close()
    time.sleep(300)


if __name__ == "__main__":
    notebook_launcher(work, (sys.argv[1],), num_processes=2, start_method="fork")
"""
OWNER = """
import sys
from multiprocessing.connection import Listener
from notebook_accel.launch import children, leftovers
leftovers.make_sockets_folder()
listener = Listener(family="AF_UNIX")
print(listener.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files that is this test's."""
    with tempfile.TemporaryDirectory() as folder:  # its path is shorter than pytest's
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr(leftovers, "_OTHER", folder)
        yield Path(folder)


@pytest.fixture
def start(temp: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a process that has its sockets in a folder of its own."""
    started = []

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(temp), "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, "-c", OWNER], env=environment, text=True, **pipes))  # type: ignore[call-overload]
        socket = Path(started[-1].stdout.readline().strip())
        assert socket.exists() and socket.parent.parent == temp
        return started[-1]  # type: ignore[no-any-return]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def kill(one: subprocess.Popen[str]) -> None:
    one.kill()
    one.wait()


# -- folders of sockets


@on_linux
def test_a_folder_is_left_by_who_is_killed_and_not_by_who_runs_or_ends(
    temp: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    runs, ended, killed = start(), start(), start()
    ended.communicate()
    assert leftovers.find() == {}
    kill(killed)
    ((folder, text),) = leftovers.find().items()
    assert text == f"sockets of process {killed.pid}, which has ended"
    shutil.rmtree(folder)
    assert leftovers.find() == {} and runs.poll() is None
    assert len(list(temp.iterdir())) == 1, "that of the process that runs"


@on_linux
def test_the_next_one_removes_what_a_killed_one_has_left(
    temp: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    kill(start())
    (left,) = temp.iterdir()
    start()
    assert len(list(temp.iterdir())) == 1 and not left.exists()


@on_linux
def test_only_folders_of_this_machine_whose_owner_has_ended_are_removed(
    temp: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    kill(start())
    (left,) = temp.iterdir()
    own = owners.find(os.getpid())
    assert own is not None
    reused = f"{own.machine}-{own.pid}-{own.start + 1}"
    others = (owners.describe_own(), f"{int(own.machine, 16) ^ 1:08x}-1-1", "00000000-0-0", "12345678")
    gone = temp / f"{leftovers.PREFIX}{reused}-12345678"
    kept = [temp / f"{leftovers.PREFIX}{other}-12345678" for other in others]
    for folder in (gone, *kept):
        folder.mkdir()
    link = temp / f"{leftovers.PREFIX}{reused}-link"
    link.symlink_to(kept[0])
    assert leftovers.find().keys() == {left, gone}
    leftovers.remove_abandoned()
    assert set(temp.iterdir()) == {*kept, link}


@on_linux
def test_what_a_killed_launch_leaves_is_found(temp: Path, tmp_path: Path) -> None:
    script, ready = tmp_path / "launcher.py", tmp_path / "ready"
    script.write_text(LAUNCHER)
    environment = {**os.environ, "TMPDIR": str(temp), "PYTHONPATH": str(ROOT)}
    os.mkfifo(ready)
    command = [sys.executable, str(script), str(ready)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as launcher:
        ready.read_text()  # until a worker has opened it
        assert leftovers.find() == {}
        stop(launcher.pid)  # it cannot tidy up while the others die
        for child in psutil.Process(launcher.pid).children(recursive=True):
            child.kill()
        launcher.kill()
        launcher.wait()
    wait_until(lambda: leftovers.find())
    assert list(leftovers.find()) == list(temp.iterdir())
    leftovers.remove_abandoned()
    assert not list(temp.iterdir())


@pytest.fixture
def long_folder(tmp_path: Path, temp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary folder whose path is too long, in which multiprocessing has no folder yet; there is another one."""
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(leftovers, "_OTHER", "/tmp")
    monkeypatch.setitem(process.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    return folder


@pytest.mark.parametrize("was_used", [False, True])
def test_sockets_of_multiprocessing_find_room(long_folder: Path, was_used: bool) -> None:
    if was_used and sys.version_info < (3, 14):  # which looks for a shorter path itself
        with pytest.raises(OSError, match="AF_UNIX path too long"):
            Listener(family="AF_UNIX")
    path = leftovers.make_sockets_folder()
    assert path is not None and not path.startswith(str(long_folder))
    with Listener(family="AF_UNIX") as listener:
        assert os.path.dirname(str(listener.address)) == path
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert leftovers.make_sockets_folder() == path
    assert tempfile.gettempdir() == str(long_folder), "the user's own files stay where they were"
    os.rmdir(path)
    assert leftovers.make_sockets_folder() not in (None, path), "another program had tidied up"
