"""What ended workers have left running, beside processes that only seem to be theirs; what a worker ends itself."""

from __future__ import annotations

import contextlib
import os
import signal
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
    monkeypatch.setattr(leftovers, "_KILLED_SECONDS", 60.0)


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


# -- in the worker

PROGRAM = """
import os, subprocess, sys
from notebook_accel.launch import leftovers

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); signal.pause()"

def start(more="", **options):
    process = subprocess.Popen([sys.executable, "-c", DEAF + more], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return process

os.setsid()
leftovers._CHILDREN_SECONDS = 0.1
started = {
    "plain": start(),
    "group": start(preexec_fn=os.setpgrp),
    "session": start(start_new_session=True),
    "tracker": start(" # from joblib.externals.loky.backend.resource_tracker import main; main(3)"),
}
leftovers.end_children()
for name in ("plain", "group"):
    started.pop(name).wait()
print(*(name for name, process in started.items() if process.poll() is None))
for process in started.values():
    process.kill()
    process.wait()
"""


def test_trackers_and_other_sessions_live_on() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert done.stdout == "session tracker\n", done.stderr


MAKER = "echo > /dev/shm/torch_$$_7_7; echo $$; exec sleep 300"
MAKERS = f"""
import os, subprocess
from notebook_accel.launch import leftovers

os.setsid()
leftovers._CHILDREN_SECONDS = 60.0  # it does obey
pids = []
for is_detached in (False, True):
    maker = subprocess.Popen(["sh", "-c", {MAKER!r}], stdout=subprocess.PIPE, start_new_session=is_detached)
    pids.append(int(maker.stdout.readline()))
leftovers.end_children()
print(*(os.path.exists(f"/dev/shm/torch_{{pid}}_7_7") for pid in pids))
maker.kill()
os.remove(f"/dev/shm/torch_{{maker.pid}}_7_7")
"""


def test_shared_memory_of_its_children_is_removed() -> None:
    """As torch makes a tensor and is ended before it can take the name away."""
    done = subprocess.run([sys.executable, "-c", MAKERS], capture_output=True, text=True, timeout=240)
    assert done.stdout == "False True\n", done.stderr


def test_shared_memory_of_what_others_ended_is_removed(tmp_path: Path) -> None:
    """As multiprocessing ends its daemons when a process exits, those of a loader too."""
    program = """
import multiprocessing, os, time
from notebook_accel import notebook_launcher

def make(pipe):
    open(f"/dev/shm/torch_{os.getpid()}_7_7", "w").close()
    pipe.send(os.getpid())
    time.sleep(300)

def work():
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=make, args=(theirs,), daemon=True).start()
    return ours.recv()

print(*(os.path.exists(f"/dev/shm/torch_{pid}_7_7") for pid in notebook_launcher(work, (), 2, returns="all")))
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "False False", done.stderr
