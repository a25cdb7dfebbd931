"""A kernel by which a process stands by, for the tests of that: cells, and what is seen of the process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

from tests.notebooks.kernel import Kernel

IMPORTS = """
import os, sys, time, torch
import notebook_accel
from notebook_accel import Session, notebook_launcher, runtime
def describe():
    return next(((one.pid, one.is_copy, one.has_compiler) for one in runtime.standby()), None)
"""
USE = "secret = torch.randn(600, 600) @ torch.randn(600, 600)\nNone"  # OpenMP's threads: no fork from here on
RANKS = "notebook_launcher(lambda: os.environ['RANK'], num_processes=2, returns='all')"
COPIED = "(from a clean copy of this kernel)"
SERVED = "(from a fork server)"
PATIENCE = 60.0


def find(kernel: Kernel) -> tuple[int, bool, bool]:
    """Return the process id of what stands by, whether it is a copy, and whether it has torch's compiler."""
    found = eval(kernel.run("describe()").ok().value)
    assert found is not None
    return found


def is_running(pid: int) -> bool:
    """Return whether a process is there, and is no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
