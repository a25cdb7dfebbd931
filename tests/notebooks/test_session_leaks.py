"""What sessions leave behind in a kernel: nothing."""

from __future__ import annotations

import ast

import pytest

from tests.notebooks.kernel import Kernel, wait_until

pytestmark = [pytest.mark.notebook, pytest.mark.once, pytest.mark.slow]

STATE = """
import threading, gc
from notebook_accel import Session

def state():
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    return fds, threading.active_count(), len(os.listdir("/dev/shm")), len(os.listdir("/proc/self/task"))
def work(t):
    print("line")
    return t * 2
"""


def _grown(before: str, after: str) -> bool:
    """Tell whether a number is larger than it was: one that is smaller held a thread that had just ended."""
    return any(map(int.__gt__, ast.literal_eval(after), ast.literal_eval(before)))


def test_many_calls_leak_nothing(fresh_kernel: Kernel) -> None:
    kernel = fresh_kernel
    kernel.run(f"{STATE}\ns = Session(2)\nx = torch.ones(100_000)").ok()
    kernel.run("for _ in range(10): s.run(work, x)").ok()
    look = "*state(), *s.run(lambda: len(os.listdir('/proc/self/fd')), returns='all')"
    before = kernel.run(look).ok().value
    kernel.run("for _ in range(200): s.run(work, x)", timeout=240).ok()
    assert wait_until(lambda: not _grown(before, kernel.run(look).ok().value), 60), before


def test_many_sessions_leak_nothing(fresh_kernel: Kernel) -> None:
    kernel = fresh_kernel
    kernel.run(STATE).ok()
    kernel.run("for _ in range(2): Session(2).close()").ok()
    before = kernel.run("state()").ok().value
    kernel.run("for _ in range(5):\n    with Session(2) as s: s.run(dist.get_rank)").ok()
    assert wait_until(lambda: not _grown(before, kernel.run("state()").ok().value), 60), before
