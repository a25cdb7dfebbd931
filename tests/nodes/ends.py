"""How long after a fault processes end and errors are told: what the pages promise, and what a busy machine adds."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

PROMISED_SECONDS = 15.0
CUT_SECONDS = 35.0
"""The same of the ranks behind a link that is cut, of whose loss the cell tells before."""
LATE_SECONDS = 5.0
"""What the promise leaves out: how late processes run that wait for a processor."""
_PATIENCE = 60.0  # so that a failure says how long it took


def read_pids(notes: Path) -> list[int]:
    """Return the numbers of processes that ranks have written to a file."""
    return [int(word) for word in notes.read_text().split()]


def assert_gone(pids: list[int], since: float, promised: float = PROMISED_SECONDS) -> None:
    """Assert that processes have ended in the time that is promised.

    Args:
        pids: their numbers.
        since: when the fault was, by the monotonic clock.
        promised: seconds after which they have.
    """
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() - since < _PATIENCE:
        time.sleep(0.02)
    assert not left, f"{left} of {pids} still run {_PATIENCE:g} s after the fault"
    assert_in_time(since, promised)


def assert_in_time(since: float, promised: float = PROMISED_SECONDS) -> None:
    """Assert that what is promised has happened by now.

    Args:
        since: when the fault was, by the monotonic clock.
        promised: seconds after which it has.
    """
    lasted = time.monotonic() - since
    assert lasted <= promised + LATE_SECONDS, f"it took {lasted:.1f} s, and {promised:g} are promised"
