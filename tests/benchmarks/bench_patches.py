"""The look for what a notebook set in libraries, as a launch of fresh workers takes it: the first and later ones."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from tests.benchmarks.table import Row, compare
from tests.notebooks.kernel import Kernel

ROUNDS = 7
BOUNDS = {"first": 0.15, "later": 0.03}
LOOK = """
import time, numpy, torch, torch._dynamo, matplotlib.pyplot, sklearn.linear_model, sklearn.ensemble
from notebook_accel.launch.checks.patches import PatchWatch
def look(watch):
    began = time.process_time()
    watch.find()
    return time.process_time() - began
watches = [PatchWatch() for _ in range({rounds})]
{{"first": list(map(look, watches)), "later": list(map(look, watches))}}
"""


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Kernel(Path(folder))) as kernel:
        seconds = eval(kernel.run(LOOK.format(rounds=ROUNDS)).ok().value)
    rows = []
    for which, bound in BOUNDS.items():
        others = {"ours": seconds[which], f"{bound} s": [bound] * ROUNDS}
        rows += compare(f"the {which} look for patches", others, {f"{bound} s": 1.0})
    return rows
