"""Launches from one notebook on two hosts by ssh, and on two nodes by SLURM, beside the bare `ssh` and `srun`.

What is promised are seconds more than a bare command that starts Python there and ends: they are added to it, and the
ratio is to be at most 1. A first launch imports torch on each host, which no function that trains can do without: it is
shown also beside a bare command that does. Hosts and nodes are namespaces and daemons of this machine. Needs root,
OpenSSH and SLURM; without them it measures nothing and says so.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.benchmarks import bench_stream
from tests.benchmarks.table import Row, compare, interleave
from tests.nodes.slurm_cluster import make_cluster, why_no_cluster
from tests.nodes.ssh_hosts import make_hosts, why_no_hosts
from tests.notebooks.kernel import Kernel

ROUNDS = 5
FIRST_MORE_S = 1.0
NEXT_MORE_S = 0.3
SETUP = """
import os, time
from notebook_accel import notebook_launcher
from tests.benchmarks import bench_stream

def launch(function, *args, count=2, **more):
    return notebook_launcher(function, args, count, view="text", **more, **{
        name: value[count] if isinstance(value, dict) else value for name, value in {engine}.items()
    })

def say():
    return time.time()
"""
CALL = "began = time.time()\nlaunch(say) - began"
Starter = Callable[[Path], Kernel]
Bare = Callable[[str], list[list[str]]]


def run() -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, reason, place in (
            ("ssh", why_no_hosts(), by_ssh),
            ("SLURM", why_no_cluster(), by_slurm),
        ):
            if reason:
                print(f"bench_hosts {reason}", file=sys.stderr)
                continue
            below = Path(folder, name)
            below.mkdir()
            with place(below) as (start, engine, bare, variables):
                rows += measure(name, below, start, engine, bare, variables)
    return rows


def measure(
    name: str,
    folder: Path,
    start: Starter,
    engine: Mapping[str, object],
    bare: Bare,
    variables: Mapping[str, str],
) -> list[Row]:
    """Return the rows of an engine.

    Args:
        name: for people.
        folder: for kernels.
        start: starts a kernel where the notebook is.
        engine: arguments of a launch.
        bare: returns the bare commands that run code, and start together.
        variables: their environment, besides that of this process.
    """
    setup = SETUP.replace("{engine}", repr(dict(engine)))

    def call(kernel: Kernel, code: str) -> float:
        return float(kernel.run(code, timeout=300).ok().value)

    def first() -> float:
        with contextlib.closing(start(folder)) as kernel:
            kernel.run(setup, timeout=100).ok()
            return call(kernel, CALL)

    def beside_bare(
        what: str, ours: Callable[[], float], others: Mapping[str, str], more_s: float
    ) -> list[Row]:
        contenders = {"ours": ours} | {
            f"{other} + {more_s:g} s": lambda code=code: time_commands(bare(code), variables) + more_s
            for other, code in others.items()
        }
        title = f"{name}, {what} launch to the first line"
        targets = {other: 1.0 for other in contenders if other != "ours"}
        return compare(title, interleave(contenders, rounds=ROUNDS), targets)

    rows = beside_bare("first", first, {"bare": "pass", "bare import torch": "import torch"}, FIRST_MORE_S)
    with contextlib.closing(start(folder)) as warm:
        warm.run(f"{setup}\nlaunch(say)", timeout=100).ok()
        rows += beside_bare("next", lambda: call(warm, CALL), {"bare": "pass"}, NEXT_MORE_S)
        code = "max(launch(bench_stream.work, {}, count=4, returns='all'))"
        contenders = {
            "ours": lambda: call(warm, code.format(None)),
            "a file": lambda: call(warm, code.format(repr(str(folder)))),
        }
        title = f"{name}, a step of 4 ranks, {4 * bench_stream.LINES:,} lines"
        rows += compare(title, interleave(contenders, rounds=ROUNDS), {"a file": 1.1})
    return rows


def time_commands(commands: Sequence[Sequence[str]], variables: Mapping[str, str]) -> float:
    """Return the seconds until commands that start together have ended."""
    began = time.perf_counter()
    running = [
        subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)
        for command in commands
    ]
    codes = [process.wait() for process in running]
    if any(codes):
        raise RuntimeError(f"a bare command has failed: {commands}")
    return time.perf_counter() - began


@contextlib.contextmanager
def by_ssh(
    folder: Path,
) -> Iterator[tuple[Starter, dict[str, object], Bare, dict[str, str]]]:
    with make_hosts(folder) as hosts:

        def bare(code: str) -> list[list[str]]:
            python = shlex.join([sys.executable, "-c", code])
            return [[*hosts.prefix, "ssh", host, python] for host in ("node1", "node2")]

        yield (
            hosts.start_kernel,
            {"hosts": {2: ["node1", "node2"], 4: ["node1:2", "node2:2"]}},
            bare,
            hosts.environment,
        )


@contextlib.contextmanager
def by_slurm(
    folder: Path,
) -> Iterator[tuple[Starter, dict[str, object], Bare, dict[str, str]]]:
    with make_cluster(folder) as cluster:
        engine = {"engine": "slurm", "num_nodes": 2, "slurm_keep": 30}
        yield (
            cluster.start_kernel,
            engine,
            lambda code: [["srun", "-N2", sys.executable, "-c", code]],
            cluster.environment,
        )
