"""The last act of a worker: what it has started ends."""

from __future__ import annotations

import os
import subprocess
import sys

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
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout == "session tracker\n", done.stderr


def test_a_thread_that_ends_meanwhile_hides_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["999999999", *listdir(path)])
    with subprocess.Popen(["sleep", "300"]) as child:
        assert child.pid in lifeline._list_below(os.getpid())
        child.kill()
