"""The first launches from a real kernel, clean or after a backward, and what cells pay for the agent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.table import Row, compare, interleave
from tests.notebooks.kernel import Kernel, make_event_loop, wait_until

ROUNDS = 5
FIRST_SECONDS = 0.15
SECOND_SECONDS = 0.1
CELL_SECONDS = 0.03
MORE_SECONDS = 0.3
"""Above the import of torch, where no agent is ready."""
_READY_SECONDS = 60.0
_THINKING_SECONDS = 4.0  # between the cell that defines the function and the launch
_IMPORTS = """
import time, torch
from notebook_accel import notebook_launcher, runtime
from notebook_accel.launch.agent.background import _CellWatcher
ends, watch = [], _CellWatcher.__call__
def timed(self, result=None):
    began = time.perf_counter()
    watch(self, result)
    ends.append(time.perf_counter() - began)
_CellWatcher.__call__ = timed
"""
_DEFINE = """
def train():
    torch.nn.Linear(256, 256)(torch.randn(512, 256)).sum().backward()
def step():
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
def launch(function):
    began = time.perf_counter()
    notebook_launcher(function, num_processes=2)
    return time.perf_counter() - began
"""
_LAUNCHES = "[launch(train), launch(train), launch(step)]"


def run() -> list[Row]:
    """Return rows against the seconds that are promised, and against the import of torch where no agent is ready."""
    make_event_loop()
    cells: list[float] = []
    later: dict[str, list[float]] = {"trains": [], "makes an AdamW": []}
    contenders: dict[str, Callable[[], float]] = {
        "after backward": lambda: _time_launches("train()", cells, later),
        "clean kernel": lambda: _time_launches("", cells, None),
        "no agent": lambda: _time_launches("train()", None, None),
        "import torch": _time_import,
    }
    seconds = interleave(contenders, rounds=ROUNDS, warmup=0)
    rows = []
    for name in ("after backward", "clean kernel"):
        rows += _compare(f"first launch of 2 that train, {name}", seconds[name], FIRST_SECONDS)
    for name, taken in later.items():
        rows += _compare(f"later launch of 2, not clean: it {name}", taken, SECOND_SECONDS)
    imports = f"import torch + {MORE_SECONDS} s"
    others = {"ours": seconds["no agent"], imports: [one + MORE_SECONDS for one in seconds["import torch"]]}
    rows += compare("first launch of 2 that train, no agent is ready", others, {imports: 1.0})
    return rows + _compare("longest that a cell pays for the agent", cells, CELL_SECONDS)


def _compare(what: str, taken: list[float], promised: float) -> list[Row]:
    name = f"{promised} s"
    return compare(what, {"ours": taken, name: [promised] * len(taken)}, {name: 1.0})


def _time_launches(use: str, cells: list[float] | None, later: dict[str, list[float]] | None) -> float:
    """Return the seconds of the first launch of a new kernel, after a cell that uses torch.

    Args:
        use: that cell.
        cells: takes what the slowest cell pays for the agent; None where it starts at the launch.
        later: takes the seconds of the launches after the first, by what they do.
    """
    variables = {"NOTEBOOK_ACCEL_AGENT": str(cells is not None).lower()}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Kernel(Path(folder), **variables)) as kernel,
    ):
        for cell in (_IMPORTS, _DEFINE, f"{use}\nNone"):
            kernel.run(cell).ok()
        if cells is not None:
            is_ready = "runtime.agents()[0].is_ready"
            assert wait_until(lambda: kernel.run(is_ready).ok().value == "True", _READY_SECONDS)
        time.sleep(_THINKING_SECONDS)  # here: the kernel has nothing to do while its user thinks
        found: list[float] = eval(kernel.run(_LAUNCHES).ok().value)
        if cells is not None:
            cells.append(float(kernel.run("max(ends)").ok().value))
        for name, seconds in zip(later or (), found[1:], strict=False):
            assert later is not None
            later[name].append(seconds)
        return found[0]


def _time_import() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began
