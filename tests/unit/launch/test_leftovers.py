"""What ended workers have left running, beside processes that only seem to be theirs."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from notebook_accel.launch import leftovers
from notebook_accel.launch.leftovers import Leftovers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux says of processes")

DEAF = "trap : TERM; echo on; while :; do sleep 300; done"
GROUP = f"""{sys.executable} -c 'import os; os.setpgrp(); os.execlp("sh", "sh", "-c", "{DEAF}")'"""
JOB = f"{GROUP} & while :; do sleep 300; done"
START = "{ %s; } & exec sleep 300"  # a worker, and what it has started
TRACKER = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("on", flush=True)
sys.stdin.read()  # until nobody holds the other end any more
open("removed", "w").close()
def main(): pass
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait long for what does not obey, and long enough for what ends, on a busy machine too."""
    monkeypatch.setattr(leftovers, "_OBEY_SECONDS", 0.2)
    monkeypatch.setattr(leftovers, "_GONE_SECONDS", 60.0)


@pytest.fixture
def end_worker() -> Iterator[Callable[..., int]]:
    """Let a worker leave what a shell starts, which says `on`; returns its process id once it has ended."""
    pids = []

    def end_worker(left: str, **options: object) -> int:
        worker = subprocess.Popen(
            ["sh", "-c", START % left],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            **options,  # type: ignore[call-overload]
        )
        with worker:
            pids.append(worker.pid)
            assert worker.stdout.readline() == b"on\n"
            worker.kill()
            worker.wait()
        return int(worker.pid)

    yield end_worker
    for pid in pids:
        while found := list_session(pid):  # one may start the next
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def list_session(leader: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_in(process, leader)]


def is_in(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):
        return False


def end(leader: int) -> None:
    left = Leftovers()
    left.end(leader)
    left.finish()


def test_what_has_a_session_of_its_own_lives_on(end_worker: Callable[..., int], tmp_path: Path) -> None:
    """What has a process group of its own, as the jobs of a shell have, does not."""
    detached = "setsid sh -c 'echo $$ > detached; exec sleep 300'"
    pid = end_worker(f"{detached} & while [ ! -s detached ]; do sleep 0.01; done; {JOB}", cwd=tmp_path)
    stays = psutil.Process(int((tmp_path / "detached").read_text()))
    try:
        assert len({os.getpgid(process.pid) for process in list_session(pid)}) >= 2
        end(pid)
        assert not list_session(pid)
        assert stays.is_running() and stays.status() != psutil.STATUS_ZOMBIE
    finally:
        stays.kill()


def test_shared_memory_of_what_is_ended_is_removed(end_worker: Callable[..., int], tmp_path: Path) -> None:
    """As torch makes a tensor and is ended before it can take the name away; here, what obeys and what does not."""
    maker = "echo > /dev/shm/torch_$$_7_7; echo $$ >> pids"
    obeys = f"sh -c '{maker}; exec sleep 300' & while [ ! -s pids ]; do sleep 0.01; done"
    pid = end_worker(f"{obeys}; sh -c '{maker}; {DEAF}'", cwd=tmp_path)
    pids = (tmp_path / "pids").read_text().split()
    left = Leftovers()
    left.end(pid)
    assert [maker for maker in pids if Path(f"/dev/shm/torch_{maker}_7_7").exists()] == pids
    left.finish()
    assert not [maker for maker in pids if Path(f"/dev/shm/torch_{maker}_7_7").exists()]


def test_a_semaphore_that_a_killed_process_was_making_is_removed() -> None:
    """As glibc makes one: under a name of its own, open until it has the name that it was asked for."""
    names = [f"sem.{''.join(random.choices(string.ascii_letters, k=6))}" for _ in range(3)]
    left, open_yet, other = (Path("/dev/shm", name) for name in names)
    left.write_bytes(bytes(32))
    other.write_bytes(bytes(33))
    try:
        with open(open_yet, "wb") as file:
            file.write(bytes(32))
            file.flush()
            Leftovers().finish()
            assert [path.exists() for path in (left, open_yet, other)] == [False, True, True]
        Leftovers().finish()
        assert not open_yet.exists()
    finally:
        for path in (left, open_yet, other):
            path.unlink(missing_ok=True)


def test_a_number_that_is_anothers_by_now() -> None:
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as stranger:
        try:
            left = Leftovers()
            left.end(stranger.pid)
            assert not left
            assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
        finally:
            stranger.kill()
        assert stranger.wait() == -signal.SIGKILL, "nothing else has ended it"


def test_a_number_that_may_be_anothers_after_a_pause(
    end_worker: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not where a process is still there that was there before, and holds the number."""
    pid = end_worker(DEAF)
    monkeypatch.setattr(leftovers, "_OBEY_SECONDS", 300)
    left = Leftovers()
    left.end(pid)
    monkeypatch.setattr(leftovers, "_SAME_SESSION_SECONDS", -1.0)
    left.look()
    assert left
    left._left[pid]._found.clear()  # as if they had ended in the pause, and the session were another's
    left.look()
    assert not left
    assert list_session(pid)


@pytest.mark.parametrize("lack", ["descriptors", "names"])
def test_what_cannot_be_listed_ends(
    end_worker: Callable[..., int], monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """There is no free descriptor; or it starts the next process and ends, faster than processes are listed."""
    pid = end_worker(DEAF)
    monkeypatch.setattr(leftovers, "_GONE_SECONDS", 0.1)
    if lack == "names":
        monkeypatch.setattr(psutil, "pids", list)
        end(pid)
    else:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                psutil.pids()
            end(pid)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    monkeypatch.undo()
    deadline = time.monotonic() + 30
    while list_session(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("package", ["multiprocessing", "joblib.externals.loky.backend"])
def test_what_removes_shared_memory_ends_last(
    end_worker: Callable[..., int], tmp_path: Path, package: str
) -> None:
    """It is not killed: it ends by itself once what does not obey, and keeps it from its end, is killed."""
    (tmp_path / "tracker.py").write_text(TRACKER)
    command = f'{sys.executable} -c "import tracker # from {package}.resource_tracker import main; main(3)"'
    # no part of the command line of the shell, which is no tracker
    (tmp_path / "tracker.sh").write_text(f"mkfifo pipe; {command} < pipe &")
    pid = end_worker(f". ./tracker.sh; {{ {DEAF.replace('echo on;', '')}; }} > pipe", cwd=tmp_path)
    end(pid)
    assert (tmp_path / "removed").exists()
    assert not list_session(pid)


def test_all_of_a_worker_that_does_not_end_is_killed() -> None:
    """Also what has a process group of its own."""
    with subprocess.Popen(["sh", "-c", JOB], start_new_session=True, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"on\n"
        assert len({os.getpgid(process.pid) for process in list_session(worker.pid)}) == 2
        leftovers.kill_session(worker.pid)
        assert worker.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while list_session(worker.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
