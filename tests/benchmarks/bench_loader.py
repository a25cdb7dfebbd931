"""The first batch after skipping nearly all of an epoch, and loading through worker processes; raw torch beside."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.benchmarks.table import Row, compare, interleave

BATCH = 32
BATCHES = 20_000
SKIPPED = 19_900
SKIP_ROUNDS = 25
SKIPS_PER_ROUND = 8
WORKERS = 4
WORKER_BATCHES = 150
WORKER_ROUNDS = 9


class Pictures(Dataset[torch.Tensor]):
    """Samples that take some work to make."""

    def __len__(self) -> int:
        return BATCH * WORKER_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 64, 64), float(index)).mul_(0.5).clamp_(0, 1)


def run() -> list[Row]:
    rows = []
    for order in ("in order", "shuffled"):
        seconds = interleave(skipping(order == "shuffled"), rounds=SKIP_ROUNDS, warmup=2)
        targets = {"unskipped": 1.2}
        rows += compare(f"first batch after {SKIPPED} of {BATCHES}, {order}", seconds, targets)
    workers = interleave(with_workers(), rounds=WORKER_ROUNDS)
    return rows + compare(f"batch from {WORKERS} workers", workers, {"raw torch": 1.0}, per=WORKER_BATCHES)


def skipping(shuffle: bool) -> dict[str, Callable[[], float]]:
    """Return what times the first batch of our loaders, and of Accelerate's, with and without skipping."""
    data = TensorDataset(torch.arange(BATCH * BATCHES))

    def first_of(library: str, skipped: int) -> Callable[[], float]:
        module = importlib.import_module(f"{library}.data_loader")
        importlib.import_module(f"{library}").PartialState(cpu=True)
        raw = DataLoader(data, batch_size=BATCH, shuffle=shuffle)
        loader = module.prepare_data_loader(raw, use_seedable_sampler=True)

        def timed() -> float:
            taken = 0.0
            for _ in range(SKIPS_PER_ROUND):
                started = time.perf_counter()
                iterator = iter(module.skip_first_batches(loader, skipped) if skipped else loader)
                next(iterator)
                taken += time.perf_counter() - started
                iterator.close()
            return taken / SKIPS_PER_ROUND

        return timed

    return {
        "ours": first_of("notebook_accel", SKIPPED),
        "unskipped": first_of("notebook_accel", 0),
        "accelerate": first_of("accelerate", SKIPPED),
    }


def with_workers() -> dict[str, Callable[[], float]]:
    """Return what times an epoch of raw torch, of ours and of Accelerate's, with workers that stay."""

    def epoch_of(prepare: Callable[[Any], Any]) -> Callable[[], float]:
        raw: Any = DataLoader(Pictures(), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
        loader = prepare(raw)

        def timed() -> float:
            started = time.perf_counter()
            count = sum(1 for _ in loader)
            assert count == WORKER_BATCHES
            return time.perf_counter() - started

        return timed

    ours = importlib.import_module("notebook_accel").Accelerator(cpu=True)
    theirs = importlib.import_module("accelerate").Accelerator(cpu=True)
    return {
        "ours": epoch_of(ours.prepare),
        "raw torch": epoch_of(lambda loader: loader),
        "accelerate": epoch_of(theirs.prepare),
    }
