"""What prepare makes of loaders that have something of their own: an order, a share, or an iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from notebook_accel import Accelerator, DataLoaderConfiguration
from tests.unit.multiprocess import run_ranks


class Downwards(RandomSampler):
    """An order of its own, that two random numbers begin."""

    def __iter__(self) -> Iterator[int]:
        head = torch.randperm(len(self))[:2].tolist()
        return iter([*head, *(index for index in reversed(range(len(self))) if index not in head)])


def ranks_have_an_order_of_their_own() -> list[int]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    torch.manual_seed(accelerator.process_index)
    data: Any = list(range(12))
    loader = accelerator.prepare(DataLoader(data, batch_size=3, sampler=Downwards(data)))
    assert type(loader.get_sampler()) is Downwards
    return [number for batch in loader for number in accelerator.gather_for_metrics(batch).tolist()]


def test_only_torchs_own_random_sampler_is_replaced() -> None:
    first, second = run_ranks(ranks_have_an_order_of_their_own)
    assert first == second and sorted(first) == list(range(12))
    assert first[2:] == sorted(first[2:], reverse=True), "its own order"
