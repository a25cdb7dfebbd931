"""Folders of sockets whose owner was killed are removed by whoever comes next."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from notebook_accel.launch import socket_owners

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that is this test's."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path.parent, prefix="t"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(socket_owners, "OTHERS", ())
    return folder


def make(temp: Path, owner: socket_owners.Owner) -> Path:
    folder = Path(tempfile.mkdtemp(dir=temp, prefix=socket_owners.PREFIX))
    (folder / "owner").write_text(f"{owner.machine} {owner.pid} {owner.start}")
    return folder


def start() -> tuple[subprocess.Popen[bytes], socket_owners.Owner]:
    process = subprocess.Popen(["sleep", "300"])
    owner = socket_owners.find(process.pid)
    assert owner is not None
    return process, owner


def test_an_owner_has_ended_although_nobody_has_waited_for_it() -> None:
    process, owner = start()
    with process:
        assert not owner.has_ended()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owner.has_ended(), "it is a zombie"
    assert owner.has_ended()
    ours = socket_owners.find(os.getpid())
    assert ours is not None and not ours.has_ended()
    assert socket_owners.Owner(ours.machine, ours.pid, ours.start + 1).has_ended(), "the number is another's"


def test_those_of_an_owner_stay_until_it_has_ended(temp: Path) -> None:
    process, owner = start()
    with process:
        ours = socket_owners.find(os.getpid())
        assert ours is not None
        own, its = make(temp, ours), make(temp, owner)
        socket_owners.remove_folders_of(owner)
        assert own.exists() and its.exists()
        process.kill()
        process.wait()
        other = make(temp, socket_owners.Owner("another machine", owner.pid, owner.start))
        socket_owners.remove_folders_of(owner)
        assert own.exists() and other.exists() and not its.exists()


def test_one_in_use_is_waited_for(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_owners, "_LAST_SECONDS", 60.0)
    process, owner = start()
    with process:
        process.kill()
    folder = make(temp, owner)
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(folder / "listener-1")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None and user.stdin is not None
        user.stdout.readline()
        socket_owners.remove_abandoned()
        assert folder.exists()
        threading.Timer(0.1, user.stdin.close).start()
        socket_owners.remove_folders_of(owner)
        left = folder.exists()
    assert not left


def test_the_next_launch_removes_what_a_killed_one_has_left(temp: Path) -> None:
    process, owner = start()
    gone, lives = make(temp, owner), make(temp, owner)
    with process:
        process.kill()
    ours = socket_owners.find(os.getpid())
    assert ours is not None
    (lives / "owner").write_text(f"{ours.machine} {ours.pid} {ours.start}")
    code = "from notebook_accel.launch.supervise import socket_folder; socket_folder.make_own()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temp)}, check=True)
    assert list(temp.iterdir()) == [lives] and not gone.exists()
