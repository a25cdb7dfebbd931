"""The process that stands by, as the notebook sees it; tests/notebooks/test_standby.py tries it in kernels."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import forkserver, util
from pathlib import Path

import pytest

from notebook_accel import runtime
from notebook_accel.launch.supervise import standby

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="nothing stands by on Windows")


@pytest.fixture
def sleeper() -> Iterator[standby.Standby]:
    """A child of this process that only waits, in place of one that stands by."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    ours, theirs = socket.socketpair()
    with theirs:
        made = standby.Standby(process.pid, ours, is_copy=False)
        try:
            yield made
        finally:
            made.is_taken = False
            made.end()
            process.returncode = 0  # `end` has waited for it


def test_a_script_has_none() -> None:
    code = "import IPython, torch, notebook_accel.runtime as runtime; print(len(runtime.standby()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has copies")
def test_a_file_that_is_written_is_an_obstacle_and_one_that_is_read_is_not(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("")
    code = (
        "import sys; from notebook_accel.launch.supervise import standby\n"
        "file = open(sys.argv[1], sys.argv[2]); print(standby._find_open_file())"
    )
    for mode, expected in (("r", ""), ("a", str(path)), ("r+", str(path))):
        command = [sys.executable, "-c", code, str(path), mode]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, close_fds=True)
        assert done.stdout.strip() == expected, done.stderr
    with open(tmp_path / "server.log", "w") as log:  # what its own output goes to is no such file
        command = [sys.executable, "-c", code + "; assert not standby._find_open_file()", str(path), "r"]
        assert subprocess.run(command, stdout=log, stderr=log, timeout=120).returncode == 0


def test_a_module_of_the_users_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    code = (
        "import sys, torch, torch.distributed.nn, notebook_accel, notebook_accel.widgets\n"
        "from notebook_accel.launch.supervise import standby\n"
        "notebook_accel.notebook_launcher; print([standby._find_own_module()])\n"
        "sys.path.insert(0, sys.argv[1]); import mine; print([standby._find_own_module()])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]  # a process of its own: others' tests import theirs
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["['']", "['mine']"], done.stderr


def test_a_process_that_has_ended_takes_nothing_over(sleeper: standby.Standby) -> None:
    os.kill(sleeper.pid, 9)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessLookupError):
        sleeper.hand_over(["code"], [0])
    assert not sleeper.is_taken


def test_programs_of_others_start_as_ever_while_a_server_is_asked_for(sleeper: standby.Standby) -> None:
    original = util.spawnv_passfds
    python = os.fsencode(sys.executable)
    with standby.serve_by(sleeper):
        assert util.spawnv_passfds is not original
        pid = util.spawnv_passfds(python, [python, b"-c", b"import sys; sys.exit(7)"], [])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert not sleeper.is_taken
    assert util.spawnv_passfds is original
    with pytest.raises(ChildProcessError):  # no server was asked for: nobody needs it any more
        os.waitpid(sleeper.pid, os.WNOHANG)


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("from multiprocessing.forkserver import main; main(5, 6, ['torch'], **{})", []),
        (
            "import sys; from multiprocessing.forkserver import main; main(5, 6, [], sys_argv=sys.argv[1:])",
            ["kernel.py", "-f", "file"],  # Python 3.14
        ),
        ("from multiprocessing.resource_tracker import main;main(5)", []),
    ],
)
def test_a_fork_server_is_found_in_its_command_line(code: str, more: list[str]) -> None:
    expected = [code, *more] if "forkserver" in code else []
    command = [os.fsencode(word) for word in ("python", "-B", "-c", code, *more)]
    assert standby.find_server(command) == expected
    assert standby.find_server(["program"]) == []


def test_the_fork_server_of_this_python_is_handed_over(
    sleeper: standby.Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its command line looks like in this version."""
    given: list[list[str]] = []
    kept: list[int] = []

    def take(words: list[str], fds: list[int]) -> int:
        given.append(words)
        kept.extend(map(os.dup, fds))  # newer versions write to the server at once
        return sleeper.pid

    monkeypatch.setattr(sleeper, "hand_over", take)
    server = forkserver.ForkServer()
    with standby.serve_by(sleeper):
        server.ensure_running()
    server._forkserver_pid = None  # type: ignore[attr-defined]
    for fd in (server._forkserver_alive_fd, *kept):  # type: ignore[attr-defined]
        os.close(fd)
    os.unlink(server._forkserver_address)  # type: ignore[attr-defined]
    assert len(given) == 1 and "forkserver" in given[0][0]


def test_a_start_method_by_hand_finds_none(sleeper: standby.Standby, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_standby", [sleeper])
    monkeypatch.setattr(standby, "_has_server", lambda: False)
    assert standby.find_usable({"start_method": "forkserver"}) is None
    assert standby.find_usable({"start_method": "auto"}) is sleeper
    os.kill(sleeper.pid, 9)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert standby.find_usable({}) is None and standby.find() is None
