"""Programs that a test runs in a Python of their own, in odd circumstances."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests import forker

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0  # for a program; below the time of a test. Much else may run, and any process stand still
SEED = int(os.environ.get("FAULTS_SEED", random.randrange(10**6)))  # of what a test chooses at random
TIMES = int(os.environ.get("FAULTS_TIMES", 1))  # how many times as many random moments are tried
HEAD = """
import os, signal, socket, subprocess, sys, threading, time
import notebook_accel as na
from notebook_accel import Session, notebook_launcher

def wait_until(is_true, what):
    end = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < end, what
        time.sleep(0.02)

def be_patient():
    # on a busy machine a process may stand still for longer than the package waits for it
    from notebook_accel.launch import leftovers
    from notebook_accel.launch.supervise import hang_watch, stop_agreement, worker_group
    from notebook_accel.session import call
    worker_group._PEER_END_SECONDS = 60.0
    hang_watch._ANSWER_SECONDS = stop_agreement._ANSWER_SECONDS = 60.0
    leftovers._KILLED_SECONDS = call._RELEASE_SECONDS = 60.0
"""


def start(code: str, folder: Path, prefix: Sequence[str] = (), is_copy: bool = True) -> subprocess.Popen[str]:
    """Start a program; it leads a process group, and its output is a pipe.

    Args:
        code: what it runs, after `HEAD`.
        folder: its working folder.
        is_copy: whether it is a copy of a process that has imported torch; with a prefix it is none.
        prefix: words before its command, such as those of `places`.
    """
    path = folder / "program.py"
    path.write_text(HEAD + textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "1"}
    begin = forker.start if is_copy else subprocess.Popen
    return begin(
        [*prefix, sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def run(
    code: str, folder: Path, *, expected: int = 0, prefix: Sequence[str] = (), is_copy: bool = True
) -> str:
    """Return the output of a program, which has to end with an exit code in time."""
    process = start(code, folder, prefix, is_copy)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"it did not end in {SECONDS:g} s:\n{output[-4000:]}") from None
    assert process.returncode == expected, (process.returncode, output[-4000:])
    return output


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(is_true: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
