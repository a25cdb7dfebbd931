"""An epoch whose batches rank 0 reads and sends to two ranks, beside Accelerate's dispatcher."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.benchmarks.subprocesses import two_ranks
from tests.benchmarks.table import Row, compare, interleave

BATCHES = 60
BATCH = 32
ROUNDS = 15
TARGET = 0.8


class Ready(Dataset[Any]):
    """Batches that are there already, so that what is timed is the way to the ranks."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        return self.batch


def run() -> list[Row]:
    rows = []
    for what in ("tokens", "pictures"):
        seconds = two_ranks(f"bench_dispatcher:{what}")
        rows += compare(f"dispatcher, {what}", seconds, {"accelerate": TARGET}, per=BATCHES // 2)
    return rows


def tokens() -> dict[str, list[float]]:
    names = ("input_ids", "attention_mask", "labels")
    return measure({name: torch.ones(BATCH, 128, dtype=torch.int64) for name in names})


def pictures() -> dict[str, list[float]]:
    return measure((torch.rand(BATCH, 3, 64, 64), torch.ones(BATCH, dtype=torch.int64)))


def measure(batch: Any) -> dict[str, list[float]]:
    """Return the seconds of epochs by contender."""
    names = {"ours": "notebook_accel", "accelerate": "accelerate"}
    seconds = interleave({name: epoch(library, batch) for name, library in names.items()}, rounds=ROUNDS)
    dist.barrier()
    dist.destroy_process_group()
    return seconds


def epoch(library: str, batch: Any) -> Callable[[], float]:
    """Return what times an epoch, in which two batches make a global one."""
    importlib.import_module(library).Accelerator(cpu=True)
    loader = importlib.import_module(f"{library}.data_loader").prepare_data_loader(
        DataLoader(Ready(batch), batch_size=None),
        torch.device("cpu"),
        dispatch_batches=True,
        put_on_device=True,
    )

    def timed() -> float:
        dist.barrier()
        started = time.perf_counter()
        seen = sum(1 for _ in loader)
        taken = time.perf_counter() - started
        assert seen == BATCHES // 2
        return taken

    return timed
