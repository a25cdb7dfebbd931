"""Stops processes in tests, so that they surely stand still."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from tests.unit.clock import wait_until


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads stands: a signal takes effect at some time."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(state == "T" for state in _find_states(pid)))


def _find_states(pid: int) -> list[str]:
    threads = Path(f"/proc/{pid}/task")
    if threads.is_dir():
        states = []
        for thread in threads.iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                states.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
        return states
    return ["T" if psutil.Process(pid).status() == psutil.STATUS_STOPPED else ""]
