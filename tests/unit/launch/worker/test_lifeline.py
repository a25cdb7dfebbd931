"""A worker ends with its notebook."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at what Linux says of processes")

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
