"""A call of a session of two workers, beside a launch of them, and beside the least a call can be: a pipe each way."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

from tests.benchmarks.subprocesses import Contender
from tests.benchmarks.table import Row, compare, interleave

ROUNDS = 9
CALLS = 20


def run() -> list[Row]:
    with contextlib.ExitStack() as stack:
        makers = {"ours": "ours", "a launch": "launch", "two bare pipes": "bare_pipes", "5 ms": "five"}
        contenders = {
            name: stack.enter_context(Contender(f"bench_session:{maker}")) for name, maker in makers.items()
        }
        seconds = interleave(contenders, rounds=ROUNDS, warmup=2)
    return compare("call of a session of 2 workers", seconds, {"a launch": 0.1, "5 ms": 1.0})


def small() -> int:
    return 1


def ours() -> Callable[[], float]:
    from notebook_accel import Session

    session = Session(2)
    return lambda: each(lambda: session.run(small))


def launch() -> Callable[[], float]:
    from notebook_accel import notebook_launcher

    def one_round() -> float:
        started = time.perf_counter()
        notebook_launcher(small, num_processes=2)
        return time.perf_counter() - started

    return one_round


def five() -> Callable[[], float]:
    """The promise, as a contender that always takes it."""
    return lambda: 0.005


def bare_pipes() -> Callable[[], float]:
    """Two processes that unpickle a function, call it and send what it returns."""
    context = multiprocessing.get_context("fork")
    ends = []
    for _ in range(2):
        here, there = context.Pipe()
        context.Process(target=answer, args=(there,), daemon=True).start()
        ends.append(here)

    def call() -> None:
        for end in ends:
            end.send(small)
        assert [end.recv() for end in ends] == [1, 1]

    return lambda: each(call)


def answer(end: Any) -> None:
    while True:
        end.send(end.recv()())


def each(call: Callable[[], object]) -> float:
    """Return the mean seconds of a few calls."""
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS
