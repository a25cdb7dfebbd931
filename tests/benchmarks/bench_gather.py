"""Gather of a tree of five tensors over two ranks, beside one all_gather of a tensor of the same size."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.subprocesses import two_ranks
from tests.benchmarks.table import Row, compare, interleave

CALLS = 20
ROUNDS = 40


def run() -> list[Row]:
    same = compare(
        "gather of 5 tensors, one dtype",
        two_ranks("bench_gather:one_dtype"),
        {"one raw all_gather": 1.6},
        per=CALLS,
    )
    mixed = compare("gather of 5 tensors, two dtypes", two_ranks("bench_gather:two_dtypes"), {}, per=CALLS)
    return same + mixed


def one_dtype() -> dict[str, list[float]]:
    return measure(torch.float32)


def two_dtypes() -> dict[str, list[float]]:
    return measure(torch.int64)


def measure(label_type: torch.dtype) -> dict[str, list[float]]:
    """Return the seconds of CALLS gathers by contender."""
    import accelerate

    import notebook_accel

    tree = {
        "logits": torch.rand(64, 10),
        "labels": torch.ones(64, dtype=label_type),
        "more": [torch.rand(64), torch.rand(64, 32), torch.ones(64, 2, dtype=label_type)],
    }
    size = 64 * (10 + 1 + 1 + 32 + 2)
    ours = notebook_accel.Accelerator(cpu=True)
    theirs = accelerate.Accelerator(cpu=True)
    assert ours.num_processes == theirs.num_processes == 2
    assert ours.gather(tree)["more"][1].shape == (128, 32)
    flat = torch.rand(size)
    slots = [torch.empty(size) for _ in range(2)]
    work: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.gather(tree),
        "one raw all_gather": lambda: dist.all_gather(slots, flat),
        "accelerate": lambda: theirs.gather(tree),
    }
    seconds = interleave({name: timed(work[name]) for name in work}, rounds=ROUNDS, warmup=3)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    def one_round() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        return time.perf_counter() - started

    return one_round
