"""A hundred thousand lines from four ranks into a cell: what they cost the ranks, beside a file."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

from tests.benchmarks.table import Row, compare, interleave
from tests.notebooks.kernel import Kernel

RANKS = 4
LINES = 25_000
PER_SECOND = 3_000  # of each rank, which computes in between
ROUNDS = 5
_LINE = re.compile(r"^\[(\d)\] line (\d+) of rank \1, and some more words that a training may print$")


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel(Path(folder))
        try:
            kernel.run(
                "from notebook_accel import notebook_launcher\nfrom tests.benchmarks import bench_stream"
            ).ok()
            seconds = interleave(
                {"ours": lambda: into_the_cell(kernel), "a file": lambda: into_files(kernel, folder)},
                rounds=ROUNDS,
            )
        finally:
            kernel.close()
    return compare(f"a step of {RANKS} ranks, {RANKS * LINES:,} lines", seconds, {"a file": 1.05})


def into_the_cell(kernel: Kernel) -> float:
    """Print all lines; return the mean seconds of a step. Fails where a line is lost, torn or out of order."""
    cell = kernel.run(_call(None), timeout=300).ok()
    found: dict[str, list[int]] = {str(rank): [] for rank in range(RANKS)}
    for line in cell.lines:
        match = _LINE.match(line)
        assert match is not None, f"torn: {line!r}"
        found[match[1]].append(int(match[2]))
    assert all(numbers == list(range(LINES)) for numbers in found.values()), "lines are missing"
    return _mean(cell.value)


def into_files(kernel: Kernel, folder: str) -> float:
    """Write them to a file of each rank; return the mean seconds of a step."""
    return _mean(kernel.run(_call(folder), timeout=300).ok().value)


def _call(folder: str | None) -> str:
    return f"notebook_launcher(bench_stream.work, ({folder!r},), num_processes={RANKS}, returns='all')"


def _mean(values: str) -> float:
    steps = [float(text) for text in values.strip("[]").split(",")]
    return sum(steps) / len(steps)


def work(folder: str | None) -> float:
    """On each rank: compute, and tell now and then; return the mean seconds of a step."""
    import os
    import sys

    import torch

    rank = os.environ["RANK"]
    out = sys.stdout if folder is None else open(f"{folder}/{rank}", "w", buffering=1)  # noqa: SIM115
    matrix, steps = torch.rand(48, 48), 0
    started = time.perf_counter()
    for number in range(LINES):
        while time.perf_counter() < started + number / PER_SECOND:
            matrix = (matrix @ matrix).tanh()
            steps += 1
        print(f"line {number} of rank {rank}, and some more words that a training may print", file=out)
    seconds = time.perf_counter() - started
    if folder is not None:
        out.close()
    return seconds / max(1, steps)
