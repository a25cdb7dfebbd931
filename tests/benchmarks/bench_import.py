"""Imports in a fresh interpreter: after torch, as in most notebooks, and cold; by our name and by the take-over.

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
SCRIPT = """
import time
{before}
started = time.process_time()
{code}
print(time.process_time() - started)
"""
TAKE = "import notebook_accel.takeover; notebook_accel.takeover.take_over_accelerate()"
_NAME = "from accelerate import Accelerator"
_LAUNCHER = "from {} import notebook_launcher"
ROWS = (
    ("import of the package, after torch", "import torch", "import notebook_accel", "import accelerate", 0.2),
    (
        "import of notebook_launcher, after torch",
        "import torch",
        _LAUNCHER.format("notebook_accel"),
        _LAUNCHER.format("accelerate"),
        0.4,
    ),
    (f"{_NAME}, after torch", "import torch", f"{TAKE}; {_NAME}", _NAME, 0.5),
    ("import accelerate, cold", "", f"{TAKE}; import accelerate", "import accelerate", 0.5),
)
"""Title, what is imported before, ours, theirs, and the goal."""


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        # compiled files for both, also where the environment keeps Python from writing them
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
        rows: list[Row] = []
        for title, before, ours, theirs, target in ROWS:
            contenders = {
                "ours": importing(before, ours, environment),
                "accelerate": importing(before, theirs, environment),
            }
            for contender in contenders.values():
                contender()  # compiles
            rows += compare(title, interleave(contenders, rounds=ROUNDS), {"accelerate": target})
        return rows


def importing(before: str, code: str, environment: dict[str, str]) -> Callable[[], float]:
    command = [sys.executable, "-c", SCRIPT.format(before=before, code=code)]

    def one_round() -> float:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return float(done.stdout)

    return one_round
