"""A run that outlives its notebook: when it begins, what a printed line costs who drives it, and how it is shown again.

What is promised are seconds and megabytes, so the ratio to them is to be at most 1.
"""

from __future__ import annotations

import ast
import contextlib
import os
import tempfile
import time
from pathlib import Path

import psutil

from tests.benchmarks.bench_line import LINES, RANKS, cost_of_a_line
from tests.benchmarks.table import Row, compare, interleave
from tests.notebooks.kernel import Kernel, wait_until

ROUNDS = 3
MORE_SECONDS = 2e-6
ATTACH_SECONDS = 1.0
ATTACH_MB = 100.0
SHOWN_LINES = 500_000
_PATIENCE = 300.0
_SETUP = """
import time
import psutil
from notebook_accel import attach, notebook_launcher
from tests.benchmarks import bench_detached, bench_line

def first(**more):
    began = time.time()
    return notebook_launcher(time.time, num_processes=2, view="none", **more) - began
"""
_SHOW = """
memory = psutil.Process().memory_info().rss
began = time.perf_counter()
run = attach(view="none", block=False)
while {last!r} not in run.lines(1)[-1:]:
    time.sleep(0.005)
shown = time.perf_counter() - began
run.wait()
shown, (psutil.Process().memory_info().rss - memory) / 1e6
"""


def run() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "state")
        with contextlib.closing(Kernel(Path(folder), NOTEBOOK_ACCEL_STATE=str(state))) as kernel:
            kernel.run(_SETUP).ok()
            firsts = interleave(
                {
                    "ours": lambda: first(kernel, "detach=True"),
                    "an attached one": lambda: first(kernel, "start_method='fresh'"),
                },
                rounds=ROUNDS,
            )
            lines = interleave(
                {
                    "ours": lambda: cost_of_a_driven_line(kernel, Path(folder)),
                    "an attached one and 2 us": lambda: cost_of_a_line(kernel) + MORE_SECONDS,
                },
                rounds=ROUNDS,
            )
            kernel.run(
                f"notebook_launcher(bench_line.talk, ({SHOWN_LINES},), num_processes=2, detach=True, view='none')",
                timeout=_PATIENCE,
            ).ok()
            last = f"line {SHOWN_LINES - 1} and some more words that a training may print"
            found = [ast.literal_eval(kernel.run(_SHOW.format(last=last)).ok().value) for _ in range(ROUNDS)]
    what = f"attach to {2 * SHOWN_LINES:,} lines"
    seconds, megabytes = sorted(each[0] for each in found)[ROUNDS // 2], found[0][1]
    return [
        *compare("first act of 2 detached workers, used kernel", firsts, {}),
        *compare(
            f"the driver's processor for a printed line, {RANKS * LINES:,}", lines, dict.fromkeys(lines, 1.0)
        ),
        Row(
            what=f"{what}: until the last one is there",
            other="1 s",
            ours_s=seconds,
            other_s=ATTACH_SECONDS,
            ratio=seconds / ATTACH_SECONDS,
            target=1.0,
        ),
        Row(
            what=f"{what}: the kernel's memory",
            other="100 MB",
            ours_s=megabytes,
            other_s=ATTACH_MB,
            ratio=megabytes / ATTACH_MB,
            target=1.0,
            unit="MB",
        ),
    ]


def first(kernel: Kernel, more: str) -> float:
    return float(kernel.run(f"first({more})").ok().value)


def cost_of_a_driven_line(kernel: Kernel, folder: Path) -> float:
    """Return the seconds of a processor that a driver spends on a line, beside a run that prints nothing."""
    spent = []
    for count in (0, LINES):
        for name in ("go", *map(str, range(RANKS))):
            (folder / name).unlink(missing_ok=True)
        kernel.run(
            f"run = notebook_launcher(bench_detached.talk, ({count}, {str(folder)!r}), num_processes={RANKS}, "
            "detach=True, block=False, view='none')"
        ).ok()
        assert wait_until(lambda: all((folder / str(rank)).exists() for rank in range(RANKS)), _PATIENCE)
        time.sleep(1)  # the driver reads what is left
        used = next(each for each in psutil.process_iter() if drives(each, folder)).cpu_times()
        spent.append(used.user + used.system)
        (folder / "go").touch()
        kernel.run("run.result()").ok()
    return (spent[1] - spent[0]) / (LINES * RANKS)


def drives(process: psutil.Process, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        fds = Path(f"/proc/{process.pid}/fd")
        return any(
            os.readlink(fd).startswith(f"{folder}/state") and os.readlink(fd).endswith("/lock")
            for fd in fds.iterdir()
        )
    return False


def talk(count: int, folder: str) -> None:
    """On each rank: print lines, and wait for a file."""
    for number in range(count):
        print("line", number, "and some more words that a training may print")
    Path(folder, os.environ["RANK"]).touch()
    while not Path(folder, "go").exists():
        time.sleep(0.02)
