"""Indices of one local batch in a world of 256 and in a world of 1, from a random sampler; Accelerate beside.

Each rank has the same number of batches in both worlds, so the dataset and its permutation are 256 times larger.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler

from notebook_accel.data_loader import BatchSamplerShard
from tests.benchmarks.table import Row, interleave

WORLD = 256
BATCH = 32
BATCHES_PER_RANK = 32
BATCHES_PER_ROUND = 256
ROUNDS = 15


def run() -> list[Row]:
    theirs = importlib.import_module("accelerate.data_loader").BatchSamplerShard
    seconds = interleave(
        {
            "ours, wide": share_of(BatchSamplerShard, WORLD),
            "ours, alone": share_of(BatchSamplerShard, 1),
            "accelerate, wide": share_of(theirs, WORLD),
            "accelerate, alone": share_of(theirs, 1),
        },
        rounds=ROUNDS,
    )
    return [
        row(seconds, "batch of indices, world 256", "ours, world 1", "ours, wide", "ours, alone", 15.0),
        row(seconds, "batch of indices, world 256", "accelerate", "ours, wide", "accelerate, wide"),
        row(seconds, "batch of indices, world 1", "accelerate", "ours, alone", "accelerate, alone", 1.0),
        row(
            seconds,
            "accelerate's batch, world 256",
            "accelerate, world 1",
            "accelerate, wide",
            "accelerate, alone",
        ),
    ]


def share_of(shard: Any, world: int) -> Callable[[], float]:
    """Return what iterates epochs of rank 0 and returns the seconds of one of its batches."""
    samples = world * BATCH * BATCHES_PER_RANK
    share = shard(BatchSampler(RandomSampler(range(samples)), BATCH, False), world, 0)

    def epochs() -> float:
        count = 0
        started = time.perf_counter()
        while count < BATCHES_PER_ROUND:
            for _ in share:
                count += 1
        return (time.perf_counter() - started) / count

    return epochs


def row(
    seconds: dict[str, list[float]],
    what: str,
    other: str,
    ours: str,
    theirs: str,
    target: float | None = None,
) -> Row:
    """Return one comparison of two of the contenders."""
    return Row(
        what=what,
        other=other,
        ours_s=statistics.median(seconds[ours]),
        other_s=statistics.median(seconds[theirs]),
        ratio=statistics.median(a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)),
        target=target,
    )
