"""A million lines through the record of a run: the time beside a plain list of them, and the memory that stays."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psutil

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave

LINES = 1_000_000
BOUND_GB = 0.05
ROUNDS = 2


def run() -> list[Row]:
    with contextlib.ExitStack() as stack:
        times = {"ours": "record", "a list of lines": "plain_list"}
        contenders = {
            name: stack.enter_context(Contender(f"bench_record:{maker}")) for name, maker in times.items()
        }
        rows = compare(f"{LINES:,} lines kept", interleave(contenders, rounds=ROUNDS), {})
    with contextlib.ExitStack() as stack:
        held = {"ours": stack.enter_context(Contender("bench_record:memory")), "50 MB": lambda: BOUND_GB}
        return rows + compare(
            f"memory of {LINES:,} lines, GB for s", interleave(held, rounds=1, warmup=0), {"50 MB": 1.0}
        )


def record() -> Callable[[], float]:
    from notebook_accel.stream.record import RunRecord

    return lambda: feed(RunRecord().apply)


def plain_list() -> Callable[[], float]:
    return lambda: feed([].append)


def memory() -> Callable[[], float]:
    """Return what measures the resident memory that a record takes, in GB."""
    from notebook_accel.stream.record import RunRecord

    def held() -> float:
        before = psutil.Process().memory_info().rss
        kept = RunRecord()
        feed(kept.apply)
        return (psutil.Process().memory_info().rss - before) / 1e9

    return held


def feed(take: Callable[..., object]) -> float:
    """Give eight ranks' lines of a hundred characters; return the seconds."""
    from notebook_accel.events import Lines

    started = time.perf_counter()
    for number in range(LINES):
        take(
            Lines(
                rank=number % 8,
                time=0.0,
                stream="stdout",
                texts=(f"step {number:>10}: loss 0.25 " + "." * 72,),
            )
        )
    return time.perf_counter() - started
