"""Metrics of runs in which processes see the same batch, or have none of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from notebook_accel.accelerator import Accelerator
from notebook_accel.data_loader import DataLoaderConfiguration
from notebook_accel.parallelism import ParallelismConfig
from tests.unit.multiprocess import run_ranks

SIZES = {
    "tp 2 x dp 2": {"dp_shard_size": 2, "tp_size": 2},
    "tp 4": {"tp_size": 4},
    "dp 4": {"dp_shard_size": 4},
}


def collect(sizes: dict[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("shard", "dispatch"):
        accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(**sizes),
            dataloader_config=DataLoaderConfiguration(dispatch_batches=kind == "dispatch"),
        )
        loader: Any = accelerator.prepare(DataLoader(list(range(10)), batch_size=3))  # type: ignore[arg-type]
        tensors, objects = [], []
        for batch in loader:
            tensors += accelerator.gather_for_metrics({"numbers": batch, "more": [batch]})["numbers"].tolist()
            objects += accelerator.gather_for_metrics([str(number) for number in batch.tolist()])
        found |= {f"{kind} tensors": tensors, f"{kind} objects": objects}
    found["all"] = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    found["means"] = accelerator.reduce(torch.tensor([1.0]), "sum").tolist()
    return found


def ranks_collect() -> dict[str, Any]:
    return {what: collect(sizes) for what, sizes in SIZES.items()}


def test_each_sample_counts_once() -> None:
    for found in run_ranks(ranks_collect, world_size=4, timeout=240):
        for what, seen in found.items():
            for kind in ("shard", "dispatch"):
                assert seen[f"{kind} tensors"] == list(range(10)), (what, kind)
                assert seen[f"{kind} objects"] == [str(number) for number in range(10)], (what, kind)
            assert seen["all"] == [0, 1, 2, 3] and seen["means"] == [4.0], "these are of all processes"


def ranks_have_words() -> list[Any]:
    accelerator = Accelerator(cpu=True)
    words = ["a", "b"] if accelerator.process_index == 1 else []
    return [accelerator.gather_for_metrics(words), accelerator.gather_for_metrics([])]


def test_a_process_may_have_no_objects() -> None:
    assert run_ranks(ranks_have_words) == [[["a", "b"], []]] * 2


def ranks_see_batches_of_no_fixed_size(batches: list[list[int]], even: bool) -> list[Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
    sampled: Any = DataLoader(list(range(10)), batch_sampler=batches)  # type: ignore[arg-type]
    single: Any = DataLoader(torch.arange(len(batches)), batch_size=None)  # type: ignore[arg-type]
    found: list[Any] = []
    for loader in (accelerator.prepare(sampled), accelerator.prepare(single)):
        for _ in range(2):
            tensors, objects, rounds = [], [], 0
            for batch in loader:
                rows = batch.reshape(-1)
                tensors += accelerator.gather_for_metrics({"rows": rows, "scalar": rows.sum()})[
                    "rows"
                ].tolist()
                objects += accelerator.gather_for_metrics(rows.tolist())
                objects += accelerator.gather_for_metrics((rows,), use_gather_object=True)[:0]
                rounds += 1
            found.append((tensors, objects, rounds))
    return found


def test_batches_that_complete_a_round_do_not_count() -> None:
    """They have no fixed size, so that rounds are completed by whole batches."""
    for number in (5, 4, 3, 1):
        batches = [[2 * index, 2 * index + 1] for index in range(number)]
        rounds = -(-number // 3)
        sampled, single = list(range(2 * number)), list(range(number))
        for found in run_ranks(ranks_see_batches_of_no_fixed_size, batches, True, world_size=3):
            assert found == [(sampled, sampled, rounds)] * 2 + [(single, single, rounds)] * 2, number
