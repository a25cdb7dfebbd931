"""Import through the take-over in a fresh interpreter: after torch, as in most notebooks, and cold.

`import accelerate` alone imports no torch here. CPU time, because others may use the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from tests.benchmarks.subprocesses import ROOT
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 4
TARGETS = {"accelerate": 0.5}
SCRIPT = """
import time
{before}
started = time.process_time()
{code}
print(time.process_time() - started)
"""
TAKE = "import notebook_accel.takeover; notebook_accel.takeover.take_over_accelerate()"


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        # compiled files for both, also where the environment keeps Python from writing them
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        rows: list[Row] = []
        for title, before, ending in (
            (
                "from accelerate import Accelerator, after torch",
                "import torch",
                "from accelerate import Accelerator",
            ),
            ("import accelerate, cold", "", "import accelerate"),
        ):
            contenders = {
                "ours": importing(before, f"{TAKE}; {ending}", environment),
                "accelerate": importing(before, ending, environment),
            }
            for contender in contenders.values():
                contender()  # compiles
            rows += compare(title, interleave(contenders, rounds=ROUNDS), TARGETS)
        return rows


def importing(before: str, code: str, environment: dict[str, str]) -> Callable[[], float]:
    command = [sys.executable, "-c", SCRIPT.format(before=before, code=code)]

    def one_round() -> float:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return float(done.stdout)

    return one_round
