"""Runs the benchmarks named on the command line, or all of them, and prints one table.

python -m tests.benchmarks            # all, a module bench_* each; `make bench ONLY=`
python -m tests.benchmarks launch     # one
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import psutil

from tests.benchmarks.table import Row, render

_LOOK_SECONDS = 2.0
_BUSY_SHARE = 0.1
_LOADED = "THIS MACHINE IS LOADED: others use"


def main(names: list[str]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    if unknown := set(names) - set(known):
        print(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    busy = psutil.cpu_percent(_LOOK_SECONDS) / 100
    if busy > _BUSY_SHARE:
        print(f"{_LOADED} {busy:.0%} of its processors", file=sys.stderr)
    rows: list[Row] = []
    for name in names or known:
        started = time.perf_counter()
        print(f"bench_{name} ...", end=" ", file=sys.stderr, flush=True)
        rows += importlib.import_module(f"tests.benchmarks.bench_{name}").run()
        print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(render(rows))
    if busy > _BUSY_SHARE:
        print(f"{_LOADED} {busy:.0%} of its processors before it began: the ratios say little")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
