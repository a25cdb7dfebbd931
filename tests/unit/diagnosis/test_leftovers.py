"""What killed runs have left is found and removed; what is in use, or of somebody unknown, is not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from notebook_accel.diagnosis import checks, leftovers, repairs
from notebook_accel.launch import shared_memory, socket_owners
from tests.stopping import stop
from tests.structure.source import ROOT
from tests.unit.clock import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")

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
    notebook_launcher(work, (sys.argv[1],), num_processes=2, start_method="forkserver")
"""
OWNER = """
import sys
from notebook_accel.launch.supervise import socket_folder
socket_folder.make_own()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that is this test's, as is the one for shared memory."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path.parent, prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(socket_owners, "OTHERS", ())
    monkeypatch.setattr(shared_memory, "FOLDER", folder)
    return folder


@pytest.fixture
def start(temp: Path) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Start a process that owns a folder of sockets."""
    started = []

    def start() -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(temp), "PYTHONPATH": str(ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen([sys.executable, "-c", OWNER], env=environment, text=True, **pipes))  # type: ignore[call-overload]
        assert started[-1].stdout.readline() == "\n"
        return started[-1]  # type: ignore[no-any-return]

    yield start
    for one in started:
        one.kill()
        one.communicate()


def test_a_folder_is_left_by_who_is_killed_and_not_by_who_runs_or_ends(
    temp: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    runs, ended, killed = start(), start(), start()
    ended.communicate()
    assert leftovers.find() == []
    killed.kill()
    killed.wait()
    (found,) = leftovers.find()
    assert found.text == f"sockets of process {killed.pid}, which has ended"
    found.remove()
    assert leftovers.find() == [] and runs.poll() is None
    assert len(list(temp.iterdir())) == 1, "that of the process that runs"


def kill(one: subprocess.Popen[str]) -> None:
    one.kill()
    one.wait()


def test_a_folder_stays_where_something_in_it_is_in_use_or_unknown(
    temp: Path, start: Callable[[], subprocess.Popen[str]]
) -> None:
    kill(start())
    (found,) = leftovers.find()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(found.path / "listener-1"))
        assert leftovers.find() == []
    assert leftovers.find() == [found], "the socket is closed"
    (found.path / "notes.txt").write_text("mine")
    assert leftovers.find() == []
    (found.path / "notes.txt").unlink()
    mark = found.path / "owner"
    here, pid, began = mark.read_text().rsplit(maxsplit=2)
    for text in (
        "",
        "pid",
        f"another boot {pid} {began}",
        f"{here} {os.getpid()} {socket_owners._read_state(os.getpid())[1]}",
    ):
        mark.write_text(text)
        assert leftovers.find() == [], text
    mark.write_text(f"{here} {os.getpid()} 1")
    assert len(leftovers.find()) == 1, "the number is another process's now"
    os.symlink(found.path, temp / "pymp-link")
    assert [one.path for one in leftovers.find()] == [found.path]


def test_shared_memory_of_a_process_that_has_ended(temp: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    tensor, own, other = (
        temp / name for name in (f"torch_{ended.pid}_123_0", f"torch_{os.getpid()}_123_0", f"sem.{ended.pid}")
    )
    for path in (tensor, own, other):
        path.write_bytes(b"1")
    with tensor.open():
        assert leftovers.find() == [], "this process has it open"
    (found,) = leftovers.find()
    assert found.path == tensor
    (check,) = checks._leftovers("leftovers")
    assert check.status == "warning" and str(tensor) in check.text
    (repair,) = repairs.find([check])
    assert repairs.describe(repair) == f"would  leftovers: remove {tensor} ({found.text})"
    assert isinstance(repair, repairs.Repair)
    assert repairs.apply(repair) == f"leftovers: removed {tensor}"
    assert {path.name for path in temp.iterdir()} == {own.name, other.name}


def test_a_semaphore_whose_maker_was_killed(temp: Path) -> None:
    path = temp / "sem.aB3dE6"
    path.write_bytes(bytes(32))
    (temp / "sem.mp-abcdefgh").write_bytes(bytes(32))  # it has its name
    with path.open():
        assert leftovers.find() == []
    (found,) = leftovers.find()
    assert found.path == path
    found.remove()
    assert leftovers.find() == []


def test_what_a_killed_launch_leaves_is_found(temp: Path, tmp_path: Path) -> None:
    script, ready = tmp_path / "launcher.py", tmp_path / "ready"
    script.write_text(LAUNCHER)
    environment = {**os.environ, "TMPDIR": str(temp), "PYTHONPATH": str(ROOT)}
    os.mkfifo(ready)
    command = [sys.executable, str(script), str(ready)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as launcher:
        ready.read_text()  # until a worker has opened it
        assert leftovers.find() == []
        stop(launcher.pid)  # it cannot tidy up while the others die
        for process in psutil.Process(launcher.pid).children(
            recursive=True
        ):  # the fork server would, for some time
            process.kill()
        launcher.kill()
        launcher.wait()
    wait_until(lambda: len(leftovers.find()) == 2)  # that of the fork server, and that of the workers
    found = leftovers.find()
    assert {one.path for one in found} == set(temp.glob("pymp-*"))
    for one in found:
        one.remove()
    assert not list(temp.glob("pymp-*"))
