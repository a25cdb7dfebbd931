"""Worlds larger than the machine: until an empty function has run on N ranks, and the launcher's memory meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tests.benchmarks.subprocesses import ENVIRONMENT, ROOT
from tests.benchmarks.table import Row

WORLDS = (2, 4, 8, 16)
ROUNDS = 9
MEMORY_ROUNDS = 3
TARGET = 1.3
MEGABYTE = 1e6
_LOOK_SECONDS = 0.01


def run() -> list[Row]:
    """Return a row for each world beside bare forks of as many, and one for each slope."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_world"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    rows = []
    for world, ours, bare in zip(WORLDS, found["ours"], found["bare"], strict=True):
        rows.append(_row(f"rendezvous of {world} ranks, empty function", "bare forks", ours, bare, TARGET))
    ours, bare = slope(WORLDS, found["ours"]), slope(WORLDS, found["bare"])
    rows.append(_row("each further rank, least squares", "bare forks", ours, bare))
    grown = slope(WORLDS, found["memory"])
    print(
        "launcher's memory: "
        + ", ".join(
            f"{world} ranks {size / MEGABYTE:.1f} MB"
            for world, size in zip(WORLDS, found["memory"], strict=True)
        )
        + f"; {grown / MEGABYTE:.3f} MB a rank by least squares",
        file=sys.stderr,
    )
    return rows


def _row(what: str, other: str, ours: float, theirs: float, target: float | None = None) -> Row:
    return Row(what=what, other=other, ours_s=ours, other_s=theirs, ratio=ours / theirs, target=target)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return how much `y` grows with each `x`, by least squares."""
    return statistics.linear_regression(xs, ys).slope


def measure() -> dict[str, list[float]]:
    """Return medians of seconds, ours and of bare forks, and of the launcher's memory, for each world."""
    ours, bare, memory = [], [], []
    launch(2)
    for world in WORLDS:
        taken = [(launch(world), forks(world)) for _ in range(ROUNDS)]
        ours.append(statistics.median(seconds for seconds, _ in taken))
        bare.append(statistics.median(seconds for _, seconds in taken))
        memory.append(statistics.median(watch(world) for _ in range(MEMORY_ROUNDS)))
    return {"ours": ours, "bare": bare, "memory": memory}


def join() -> float:
    """Form the process group and meet the others once; return when that was done."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    now = time.time()
    dist.destroy_process_group()
    return now


def launch(world: int) -> float:
    """Return the seconds until all ranks have met."""
    from notebook_accel import notebook_launcher

    started = time.time()
    moments = notebook_launcher(join, num_processes=world, returns="all", view="none", start_method="fork")
    return max(moments) - started


def watch(world: int) -> float:
    """Return the launcher's memory while ranks run; to watch it takes time, so no launch is timed meanwhile."""
    with watched() as sizes:
        launch(world)
    return max(sizes)


@contextlib.contextmanager
def watched() -> Iterator[list[float]]:
    """Fill the list with this process's resident bytes, once at the end, as another process saw them meanwhile."""
    import psutil

    sizes: list[float] = []
    end_read, end_write = os.pipe()
    read, write = os.pipe()
    parent = psutil.Process()
    watcher = os.fork()  # a thread would forbid the fork of workers
    if watcher == 0:
        try:
            os.close(end_write)
            largest = 0
            while not select.select([end_read], [], [], _LOOK_SECONDS)[0]:
                largest = max(largest, parent.memory_info().rss)
            os.write(write, str(largest).encode())
        finally:
            os._exit(0)
    os.close(write)
    try:
        yield sizes
    finally:
        os.write(end_write, b"x")
        os.waitpid(watcher, 0)
        sizes.append(float(os.read(read, 100)))
        for end in (end_read, end_write, read):
            os.close(end)


def forks(world: int) -> float:
    """Return the seconds until as many bare forks have met."""
    from tests.ports import free_port

    started = time.time()
    port = free_port()
    read, write = os.pipe()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.update(
                    RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
                )
                os.write(write, f"{join()}\n".encode())
            finally:
                os._exit(0)
        pids.append(pid)
    os.close(write)
    for pid in pids:
        os.waitpid(pid, 0)
    with os.fdopen(read) as ends:
        moments = [float(line) for line in ends]
    assert len(moments) == world
    return max(moments) - started


if __name__ == "__main__":
    print(json.dumps(measure()))
