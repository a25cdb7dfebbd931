"""A worker ends with its notebook, and as its last act ends what it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from notebook_accel.launch.worker import lifeline

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a process")

PROGRAM = """
import os, subprocess, sys
from notebook_accel.launch.worker import lifeline

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('on', flush=True); signal.pause()"

def start(more="", **options):
    process = subprocess.Popen([sys.executable, "-c", DEAF + more], stdout=subprocess.PIPE, **options)
    process.stdout.readline()
    return process

os.setsid()
lifeline._OBEY_SECONDS = 0.1
started = {
    "plain": start(),
    "group": start(preexec_fn=os.setpgrp),
    "session": start(start_new_session=True),
    "tracker": start(" # from joblib.externals.loky.backend.resource_tracker import main; main(3)"),
}
lifeline.end_children()
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
from notebook_accel.launch.worker import lifeline

os.setsid()
lifeline._OBEY_SECONDS = 60.0  # it does obey
pids = []
for is_detached in (False, True):
    maker = subprocess.Popen(["sh", "-c", {MAKER!r}], stdout=subprocess.PIPE, start_new_session=is_detached)
    pids.append(int(maker.stdout.readline()))
lifeline.end_children()
print(*(os.path.exists(f"/dev/shm/torch_{{pid}}_7_7") for pid in pids))
maker.kill()
os.remove(f"/dev/shm/torch_{{maker.pid}}_7_7")
"""


def test_shared_memory_of_what_is_ended_is_removed() -> None:
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


def test_a_thread_that_ends_meanwhile_hides_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["999999999", *listdir(path)])
    with subprocess.Popen(["sleep", "300"]) as child:
        assert child.pid in lifeline._list_below(os.getpid())
        child.kill()


HANGS = """
import ctypes, os, signal, subprocess, sys
from notebook_accel.launch.worker import lifeline

lifeline._SHELL = sys.argv[2]
lifeline._F_SETSIG = -1  # no command of fcntl, as on other systems
os.setsid()
lifeline.follow(int(sys.argv[1]))
started = subprocess.Popen(["sleep", "300"])
print(started.pid, flush=True)
if sys.argv[3] == "C code":
    ctypes.PyDLL(None).sleep(300)  # holds the GIL
if sys.argv[3] == "program":
    os.execvp("sleep", ["sleep", "300"])
signal.pause()
"""


@pytest.mark.parametrize(
    ("shell", "work"), [("/bin/sh", "C code"), ("/bin/sh", "program"), ("/bin/sh", ""), ("/no/shell", "")]
)
def test_where_the_system_sends_no_signal_a_shell_or_a_thread_does(shell: str, work: str) -> None:
    ours, notebooks = os.pipe()
    words = [sys.executable, "-c", HANGS, str(ours), shell, work]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, pass_fds=[ours]) as worker:
        os.close(ours)
        assert worker.stdout is not None
        started = psutil.Process(int(worker.stdout.readline()))
        others = [child for child in psutil.Process(worker.pid).children() if child != started]
        assert [child.name() for child in others] == (["sh"] if shell == "/bin/sh" else [])
        os.close(notebooks)
        assert worker.wait(60) == -signal.SIGKILL
        assert psutil.wait_procs([started, *others], 60)[1] == []
