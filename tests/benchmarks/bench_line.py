"""What a printed line costs the kernel's processor: a hundred thousand from four ranks into a cell."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from tests.benchmarks.table import Row, compare, interleave
from tests.notebooks.kernel import Kernel

RANKS = 4
LINES = 25_000
ROUNDS = 3
BOUND_SECONDS = 3e-6


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Kernel(Path(folder))) as kernel:
        kernel.run(
            "from notebook_accel import notebook_launcher\nfrom tests.benchmarks import bench_line"
        ).ok()
        costs = interleave(
            {"ours": lambda: cost_of_a_line(kernel), "3 us": lambda: BOUND_SECONDS}, rounds=ROUNDS
        )
    return compare(f"the kernel's processor for a printed line, {RANKS * LINES:,}", costs, {"3 us": 1.0})


def cost_of_a_line(kernel: Kernel) -> float:
    """Return the seconds of a processor that the kernel spends on a line, beside a launch that prints nothing."""
    code = """
    import time
    spent = []
    for count in (0, {lines}):
        before = time.process_time()
        notebook_launcher(bench_line.talk, (count,), num_processes={ranks})
        spent.append(time.process_time() - before)
    (spent[1] - spent[0]) / ({lines} * {ranks})
    """
    return float(kernel.run(code.format(lines=LINES, ranks=RANKS), timeout=300).ok().value)


def talk(count: int) -> None:
    """On each rank: print lines."""
    for number in range(count):
        print("line", number, "and some more words that a training may print")
