"""A launch whose function closes over 1 GiB, from a kernel that must not be forked, beside one copy of it."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from tests.benchmarks.table import Row, compare
from tests.notebooks.kernel import Kernel, make_event_loop

ROUNDS = 5
TARGET = 1.3
_CELL = """
import time, torch
from notebook_accel import notebook_launcher
torch.nn.Linear(256, 256)(torch.randn(512, 256)).sum().backward()  # starts torch's threads
big = torch.ones(2**28)  # of four bytes

def timed(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began

def look():
    return big[-1].item()

def rest():
    return 1.0

def launch(function):
    assert notebook_launcher(function, num_processes=2) == 1.0

launch(look)
None
"""
_ROUND = """
taken = timed(lambda: launch(look)), timed(lambda: launch(rest)), timed(big.clone)
(taken[0] - taken[1], taken[2])
"""


def run() -> list[Row]:
    """Return what the tensor adds to a launch of two, over a copy of it in memory."""
    make_event_loop()
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder), OMP_NUM_THREADS="2")
        with contextlib.closing(kernel):
            kernel.run(_CELL, timeout=120).ok()
            found = [_read_pair(kernel.run(_ROUND, timeout=120).ok().value) for _ in range(ROUNDS)]
    seconds = {"ours": [ours for ours, _ in found], "one copy": [copy for _, copy in found]}
    return compare("1 GiB closed over, kernel not clean", seconds, {"one copy": TARGET})


def _read_pair(value: str) -> tuple[float, float]:
    ours, copy = (float(part) for part in value.strip("()").split(","))
    return ours, copy
