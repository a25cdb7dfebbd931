"""Import in a fresh interpreter that has torch already, as in a notebook whose first cell imports it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
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
    with tempfile.TemporaryDirectory() as folder:
        # compiled files for both, also where the environment keeps Python from writing them
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        contenders = {
            "ours": importing("notebook_accel", environment),
            "accelerate": importing("accelerate", environment),
        }
        for contender in contenders.values():
            contender()  # compiles
        return compare("import after torch", interleave(contenders, rounds=ROUNDS), {})


def importing(name: str, environment: dict[str, str]) -> Callable[[], float]:
    command = [sys.executable, "-c", SCRIPT.format(name=name)]

    def one_round() -> float:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return float(done.stdout)

    return one_round
