"""The first launch from a real kernel, clean or after a backward, and what cells pay for the process that stands by."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.table import Row, compare, interleave
from tests.notebooks.kernel import Kernel, make_event_loop

ROUNDS = 5
GOAL_SECONDS = 0.12
CELL_SECONDS = 0.03
_THINKING_SECONDS = 4  # between the cell that defines the function and the launch
_IMPORTS = """
import time, torch
import notebook_accel.launch.supervise.standby as standby
from notebook_accel import notebook_launcher, runtime
ends, watch = [], standby._CellWatcher.__call__
def timed(self, result=None):
    began = time.perf_counter()
    watch(self, result)
    ends.append(time.perf_counter() - began)
standby._CellWatcher.__call__ = timed
"""
_DEFINE = """
def train():
    torch.nn.Linear(256, 256)(torch.randn(512, 256)).sum().backward()
"""
_LAUNCH = """
began = time.perf_counter()
notebook_launcher(train, num_processes=2)
seconds = time.perf_counter() - began
"""


def run() -> list[Row]:
    """Return rows against the seconds that are promised, and against a kernel in which nothing stands by."""
    make_event_loop()
    cells: list[float] = []
    contenders: dict[str, Callable[[], float]] = {
        "after backward": lambda: _time_first_launch("train()", cells),
        "clean kernel": lambda: _time_first_launch("", cells),
        "nothing stands by": lambda: _time_first_launch("train()", None),
    }
    seconds = interleave(contenders, rounds=ROUNDS, warmup=0)
    goal = [GOAL_SECONDS] * ROUNDS
    rows = []
    for name in ("after backward", "clean kernel"):
        others = {
            "ours": seconds[name],
            f"{GOAL_SECONDS} s": goal,
            "nothing stands by": seconds["nothing stands by"],
        }
        rows += compare(f"first launch of 2 that train, {name}", others, {f"{GOAL_SECONDS} s": 1.0})
    most = {"ours": cells, f"{CELL_SECONDS} s": [CELL_SECONDS] * len(cells)}
    return rows + compare("longest that a cell pays for what stands by", most, {f"{CELL_SECONDS} s": 1.0})


def _time_first_launch(use: str, cells: list[float] | None) -> float:
    """Return the seconds of the first launch of a new kernel, after a cell that uses torch."""
    variables = {"NOTEBOOK_ACCEL_STANDBY": str(cells is not None).lower()}
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder), **variables)
        with contextlib.closing(kernel):
            for cell in (_IMPORTS, _DEFINE, f"{use}\nNone"):
                kernel.run(cell).ok()
            time.sleep(_THINKING_SECONDS)  # here: the kernel has nothing to do while its user thinks
            kernel.run(_LAUNCH).ok()
            if cells is not None:
                cells.append(float(kernel.run("max(ends)").ok().value))
            return float(kernel.run("seconds").ok().value)
