"""Launch of an empty function on two Ray actors, beside bare actors that import torch and return."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave, show_time

ROUNDS = 5
OVERHEAD_S = 0.5
SETTLE_S = 2.0  # until what the last round's actors leave behind has ended


def run() -> list[Row]:
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed", file=sys.stderr)
        return []
    with contextlib.ExitStack() as stack:
        names = {"ours": "ours", "two bare actors": "bare"}
        contenders = {
            name: stack.enter_context(Contender(f"bench_ray:{maker}")) for name, maker in names.items()
        }
        seconds = interleave(contenders, rounds=ROUNDS, warmup=2)
    (row,) = compare("launch of an empty function on 2 Ray actors", seconds, {})
    overhead = row.ours_s - row.other_s
    print(f"overhead {show_time(abs(overhead))}{' less' if overhead < 0 else ''}", file=sys.stderr)
    target = (row.other_s + OVERHEAD_S) / row.other_s
    return compare(row.what, seconds, {"two bare actors": target})


def ours() -> Callable[[], float]:
    from notebook_accel import notebook_launcher

    def work() -> None:
        pass

    def one_round() -> float:
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        notebook_launcher(work, num_processes=2, engine="ray")
        return time.perf_counter() - started

    return one_round


def bare() -> Callable[[], float]:
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    class Actor:
        def work(self) -> None:
            import torch  # noqa: F401

    kind = ray.remote(Actor)

    def one_round() -> float:
        time.sleep(SETTLE_S)
        started = time.perf_counter()
        actors = [kind.options(num_cpus=1).remote() for _ in range(2)]
        ray.get([actor.work.remote() for actor in actors])
        taken = time.perf_counter() - started
        for actor in actors:
            ray.kill(actor)
        return taken

    return one_round
