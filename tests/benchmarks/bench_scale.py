"""Launches over up to 1,024 hosts of 8 ranks, which are simulated: what they cost the notebook's process.

Each rank writes a line a second and logs five metrics. The process is a Jupyter kernel with the view of a run. What is
promised holds for the largest number of hosts, and is shown as ratios to it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from tests.benchmarks.table import Row
from tests.notebooks.kernel import Kernel

RANKS: Final = 8
NODES: Final = (1, 4, 16, 64, 256, 1024)
VANISHED: Final = 100
STEADY_S: Final = 10.0
MOST_SHARE: Final = 0.5
MOST_MB: Final = 300.0
MOST_TELL_S: Final = 5.0
MOST_GROWTH: Final = 1.5  # of the work for each node, from one number of nodes to the next
_CELL_SECONDS: Final = 900.0
_HEAD: Final = (
    "nodes",
    "start s",
    "its CPU s",
    "CPU share",
    "MB",
    "MB more",
    "failure s",
    "interrupt s",
    "vanished s",
)


def run() -> list[Row]:
    """Measure each number of nodes in a kernel of its own; SCALE_NODES=4,16 chooses some."""
    asked = os.environ.get("SCALE_NODES", "")
    numbers = [int(word) for word in asked.split(",")] if asked else list(NODES)
    found = []
    print(f"\n{'  '.join(f'{name:>11}' for name in _HEAD)}", file=sys.stderr)
    for nodes in numbers:
        one = measure_in_kernel(nodes)
        found.append(one)
        cells = (f"{one[name]:>11.3g}" if name != "nodes" else f"{nodes:>11,}" for name in _HEAD)
        print("  ".join(cells), file=sys.stderr, flush=True)
    return make_rows(found)


def make_rows(found: Sequence[dict[str, float]]) -> list[Row]:
    """Return what is promised for the largest number of nodes, and how the work of a start grows."""
    last = found[-1]
    where = f"{last['nodes']:,.0f} nodes of {RANKS} ranks"
    rows = [
        _row(f"{where}, CPU of the notebook in a second", "half a core", last["CPU share"], MOST_SHARE, 1.0),
        _row(f"{where}, memory of the notebook", "300 MB", last["MB"], MOST_MB, 1.0, "MB"),
        _row(f"{where}, until a failure is told", "5 s", last["failure s"], MOST_TELL_S, 1.0),
        _row(f"{where}, until vanished nodes are told", "5 s", last["vanished s"], MOST_TELL_S, 1.0),
    ]
    for few, many in itertools.pairwise(found):
        if few["nodes"] >= 64:  # with fewer, what all launches do is most of it
            title = f"CPU of a start for each node, {many['nodes']:,.0f} nodes"
            ours, theirs = (one["its CPU s"] / one["nodes"] for one in (many, few))
            rows.append(_row(title, f"{few['nodes']:,.0f} nodes", ours, theirs, MOST_GROWTH))
    return rows


def _row(what: str, other: str, ours: float, theirs: float, target: float, unit: str = "") -> Row:
    return Row(
        what=what, other=other, ours_s=ours, other_s=theirs, ratio=ours / theirs, target=target, unit=unit
    )


def measure_in_kernel(nodes: int) -> dict[str, float]:
    """Return what a number of nodes costs a kernel."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Kernel(Path(folder))) as kernel:
        kernel.run("from tests.benchmarks import bench_scale").ok()
        cell = kernel.run(f"bench_scale.tell(bench_scale.measure({nodes}))", timeout=_CELL_SECONDS).ok()
        found: dict[str, float] = json.loads(cell.lines[-1])
        return found


# -- in the kernel


def tell(found: dict[str, float]) -> None:
    """Print what was measured."""
    print(f"\n{json.dumps(found)}")


def measure(nodes: int, seconds: float = STEADY_S) -> dict[str, float]:
    """Return what a number of nodes costs this process.

    Args:
        nodes: how many.
        seconds: how long the run is watched.
    """
    from notebook_accel import notebook_launcher
    from tests.benchmarks.simulated_engine import SimulatedEngine
    from tests.benchmarks.simulated_hosts import simulate

    with simulate() as cluster:

        def launch(count: int = nodes, **options: Any) -> Any:
            return notebook_launcher(
                work, engine=SimulatedEngine(cluster, count, RANKS), view="widget", **options
            )

        _warm_up(launch, cluster)
        before = psutil.Process().memory_info().rss / 1e6
        found = {"nodes": float(nodes)}
        with watched() as sizes:
            began, used = time.monotonic(), time.process_time()
            live = launch(block=False)
            wait_until_running(live, nodes * RANKS)
            found["start s"] = time.monotonic() - began
            found["its CPU s"] = time.process_time() - used
            used = time.process_time()
            time.sleep(seconds)
            found["CPU share"] = (time.process_time() - used) / seconds
            found["failure s"] = time_end(live, lambda: cluster.fail(nodes // 2, nodes // 2 * RANKS))
            found["interrupt s"] = time_interrupt(launch)
            live = launch(block=False)
            wait_until_running(live, nodes * RANKS)
            gone = range(nodes - min(VANISHED, max(1, nodes // 2)), nodes)
            found["vanished s"] = time_end(live, lambda: cluster.vanish(gone))
        found["MB"], found["MB more"] = max(sizes), max(sizes) - before
    return found


def work() -> None:
    """Do nothing: no rank runs it."""


def _warm_up(launch: Callable[..., Any], cluster: Any) -> None:
    """Launch once on one node: what a first launch imports has nothing to do with the nodes."""
    live = launch(1, block=False)
    wait_until_running(live, RANKS)
    cluster.finish([0], pickle.dumps(None))
    live.result()


def wait_until_running(live: Any, ranks: int) -> None:
    """Wait until all ranks run."""
    while not live.is_over:
        phases = live.record.phases
        if len(phases) >= ranks and all(phase.name == "running" for phase in list(phases.values())[-ranks:]):
            return
        time.sleep(0.05)
    live.result()


def time_end(live: Any, cause: Callable[[], None]) -> float:
    """Return the seconds from a cause to the exception of a run."""
    began = time.monotonic()
    cause()
    live.wait()
    assert live.failure is not None
    return time.monotonic() - began


def time_interrupt(launch: Callable[..., Any]) -> float:
    """Return the seconds from an interrupt of the cell to its end."""
    moments: list[float] = []

    def interrupt() -> None:
        from notebook_accel import runs

        while (
            not (found := [one for one in runs() if not one.is_over])
            or found[-1].status != "running"
            or len(found[-1].record.line_counts) < found[-1].job.local_world_size
        ):
            time.sleep(0.05)
        moments.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        launch()
    except KeyboardInterrupt:
        moments.append(time.monotonic())
    thread.join()
    return moments[1] - moments[0]


@contextlib.contextmanager
def watched() -> Iterator[list[float]]:
    """Fill the list with this process's resident megabytes, ten times a second."""
    process, is_over, sizes = psutil.Process(), threading.Event(), [0.0]

    def watch() -> None:
        while not is_over.wait(0.1):
            sizes.append(process.memory_info().rss / 1e6)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        is_over.set()
        thread.join()
