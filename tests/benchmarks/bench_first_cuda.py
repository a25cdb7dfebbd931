"""The first launch from a kernel that has used CUDA, beside bare forks of one that has not."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.benchmarks.table import Row, compare, interleave, leave_out
from tests.notebooks.kernel import Kernel, make_event_loop

LAUNCHES = 3
_THINKING_SECONDS = 4  # between the cell that uses CUDA and the launch
_IMPORTS = "import os, time, torch\nfrom notebook_accel import notebook_launcher\nNone"
_DEFINE = """
def train():
    torch.ones(1, device="cuda").sum().item()
def measure(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
def launch():
    notebook_launcher(train, num_processes=2, environment={"ACCELERATE_USE_CPU": "1"})
def fork_bare():
    pids = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            try:
                train()
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
"""


def run() -> list[Row]:
    """The first launch of two processes that start CUDA, over two bare forks of a clean kernel that do so."""
    what, other = "first launch of 2 after CUDA was used", "bare forks + 0.15 s"
    if not torch.cuda.is_available():
        return [leave_out(what, other, 1.0, "no GPU here")]
    make_event_loop()
    contenders: dict[str, Callable[[], float]] = {
        "ours": lambda: _time_in_kernel("torch.ones(1, device='cuda')", "launch"),
        "bare forks": lambda: _time_in_kernel("", "fork_bare"),
    }
    seconds = interleave(contenders, rounds=LAUNCHES, warmup=0)
    seconds[other] = [taken + 0.15 for taken in seconds["bare forks"]]
    return compare(what, seconds, {other: 1.0})


def _time_in_kernel(use: str, function: str) -> float:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Kernel(Path(folder))) as kernel:
        for cell in (_IMPORTS, _DEFINE, f"{use}\nNone"):
            kernel.run(cell).ok()
        time.sleep(_THINKING_SECONDS)  # here: the kernel has nothing to do while its user thinks
        return float(kernel.run(f"measure({function})", timeout=120).ok().value)
