"""The first batch after skipping, batches through worker processes, and what a loader itself costs; torch beside."""

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
# Two raw loaders differ by 5 % for as long as their workers live, where there are fewer cores than workers, and one
# round of a loader by 20 %: so new workers several times, and many short rounds.
WORKER_BATCHES = 40
WORKER_ROUNDS = 9
WORKER_SETS = 7
BARE_BATCHES = 2_000
BARE_ROUNDS = 15


class Pictures(Dataset[torch.Tensor]):
    """Samples that take some work to make."""

    def __len__(self) -> int:
        return BATCH * WORKER_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 64, 64), float(index)).mul_(0.5).clamp_(0, 1)


class Ready(Dataset[dict[str, Any]]):
    """A nested batch that is there already, so that what is timed is the loader."""

    def __init__(self) -> None:
        self.batch = {"pair": [torch.zeros(4), torch.zeros(4)], "deep": {"ids": torch.zeros(4)}}

    def __len__(self) -> int:
        return BARE_BATCHES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batch


def run() -> list[Row]:
    rows = []
    for order in ("in order", "shuffled"):
        seconds = interleave(skipping(order == "shuffled"), rounds=SKIP_ROUNDS, warmup=2)
        targets = {"unskipped": 1.2}
        rows += compare(f"first batch after {SKIPPED} of {BATCHES}, {order}", seconds, targets)
    rows += compare(f"batch from {WORKERS} workers", with_workers(), {"raw torch": 1.0}, per=WORKER_BATCHES)
    bare = epochs(BARE_BATCHES, lambda: DataLoader(Ready(), batch_size=None))
    seconds = interleave(bare, rounds=BARE_ROUNDS, warmup=2)
    return rows + compare("batch that is there already", seconds, {"accelerate": 1.0}, per=BARE_BATCHES)


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


def with_workers() -> dict[str, list[float]]:
    """Return the seconds of epochs through workers that stay, of several sets of workers."""

    def make() -> DataLoader[Any]:
        return DataLoader(Pictures(), batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)

    seconds: dict[str, list[float]] = {}
    for _ in range(WORKER_SETS):
        for name, taken in interleave(epochs(WORKER_BATCHES, make), rounds=WORKER_ROUNDS).items():
            seconds.setdefault(name, []).extend(taken)
    return seconds


def epochs(batches: int, make: Callable[[], DataLoader[Any]]) -> dict[str, Callable[[], float]]:
    """Return what times an epoch of that many batches: of the loader, and of it prepared by us and by Accelerate."""

    def epoch_of(loader: Any) -> Callable[[], float]:
        def timed() -> float:
            started = time.perf_counter()
            count = sum(1 for _ in loader)
            taken = time.perf_counter() - started
            assert count == batches
            return taken

        return timed

    ours = importlib.import_module("notebook_accel").Accelerator(cpu=True)
    theirs = importlib.import_module("accelerate").Accelerator(cpu=True)
    return {
        "ours": epoch_of(ours.prepare(make())),
        "raw torch": epoch_of(make()),
        "accelerate": epoch_of(theirs.prepare(make())),
    }
