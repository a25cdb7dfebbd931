"""Import in a fresh interpreter that has torch already, as in a notebook whose first cell imports it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from tests.benchmarks.subprocesses import ROOT
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 7
SCRIPT = """
import time, torch
started = time.perf_counter()
import {name}
print(time.perf_counter() - started)
"""


def run() -> list[Row]:
    contenders = {"ours": importing("notebook_accel"), "accelerate": importing("accelerate")}
    return compare("import after torch", interleave(contenders, rounds=ROUNDS), {"accelerate": 1.0})


def importing(name: str) -> Callable[[], float]:
    command = [sys.executable, "-c", SCRIPT.format(name=name)]

    def one_round() -> float:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return float(done.stdout)

    return one_round
