"""Loaders that are shared out before they are prepared: each sample comes once, or somebody says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SequentialSampler,
    Subset,
)

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.data_loader import prepare_data_loader, skip_first_batches
from notebook_accel.data_loader.resume import go_to_position, position_of
from tests.unit.multiprocess import run_ranks


class InTurn(Sampler[int]):
    """A sampler of the user that knows its rank, by other names."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank, self.world_size = size, rank, 2

    def __len__(self) -> int:
        return len(range(self.rank, self.size, self.world_size))

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.size, self.world_size))


class BatchesOfRank(BatchSampler):
    def __init__(self, size: int, rank: int) -> None:
        super().__init__(SequentialSampler(range(size)), 2, False)
        self.num_replicas, self.rank = 2, rank

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self.rank, None, 2)


class Stream(IterableDataset[int]):
    def __init__(self, start: int) -> None:
        self.start = start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.start + 6))


class SplitByNode(Stream):
    """As `split_dataset_by_node` of datasets leaves a dataset."""

    def __init__(self, rank: int) -> None:
        super().__init__(6 * rank)
        self._distributed = SimpleNamespace(rank=rank, world_size=2)


def distributed(size: int, rank: int, batch_size: int | None = 4, **options: Any) -> DataLoader[Any]:
    data: Any = torch.arange(size)
    drops = options.pop("drop_last", False)
    sampler = DistributedSampler(data, 2, rank, **options)
    more = {} if batch_size is None else {"drop_last": drops}
    return DataLoader(data, batch_size=batch_size, sampler=sampler, **more)


def collect(accelerator: Any, loader: Any) -> list[int]:
    found: list[int] = []
    for batch in loader:
        tensors = accelerator.gather_for_metrics(batch.reshape(-1)).tolist()
        texts = accelerator.gather_for_metrics([str(number) for number in batch.reshape(-1).tolist()])
        arrays = accelerator.gather_for_metrics(batch.reshape(-1).numpy())
        assert texts == [str(number) for number in tensors] == [str(number) for number in arrays]
        found += tensors
    return found


SIZES = (32, 31, 9, 1)


def ranks_read() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    rank, seen = accelerator.process_index, {}
    for size in SIZES:
        for batch_size in (4, None):
            loader: Any = accelerator.prepare(distributed(size, rank, batch_size, seed=1))
            epochs = [collect(accelerator, loader) for _ in range(2)]
            loader.set_epoch(0)
            seen[f"{size} by {batch_size}"] = [*epochs, collect(accelerator, loader)]
        rest = collect(accelerator, accelerator.skip_first_batches(loader, 1)) if size > 2 else []
        seen[f"skip {size}"] = len(rest)
    whole: Any = accelerator.prepare(distributed(20, rank, drop_last=True))
    seen["dropped"] = [len(collect(accelerator, whole)), whole.total_batch_size, len(whole)]
    data: Any = list(range(12))
    batches = BatchSampler(InTurn(12, rank), 2, False)
    by_rank = accelerator.prepare(DataLoader(data, batch_sampler=batches))
    batches_by_rank = accelerator.prepare(DataLoader(data, batch_sampler=BatchesOfRank(12, rank)))
    by_node = accelerator.prepare(DataLoader(SplitByNode(rank), batch_size=2))
    accelerator.dataloader_config = DataLoaderConfiguration(already_sharded=True)
    part: Any = Subset(data, range(rank, 12, 2))
    for name, own in {
        "by rank": by_rank,
        "batches by rank": batches_by_rank,
        "by node": by_node,
        "subset": accelerator.prepare(DataLoader(part, batch_size=4, shuffle=True)),
        "stream": accelerator.prepare(DataLoader(Stream(6 * rank), batch_size=4)),
    }.items():
        seen[name] = collect(accelerator, own)
    return seen


def test_each_sample_comes_once() -> None:
    first, second = run_ranks(ranks_read)
    assert first == second
    for size in SIZES:
        for batch_size in (4, None):
            zero, one, again = first[f"{size} by {batch_size}"]
            assert sorted(zero) == sorted(one) == list(range(size)), (size, batch_size)
            assert zero == again and (zero != one or size == 1)
        assert first[f"skip {size}"] == max(0, size - 2)
    assert first["dropped"] == [16, 8, 2]
    for name in ("by rank", "batches by rank", "by node", "subset", "stream"):
        assert sorted(first[name]) == list(range(12)), name


def test_a_sampler_of_other_processes_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"DistributedSampler gives rank 1 of 2 .* this is process 0 of 2: make it"
    ):
        prepare_data_loader(distributed(8, 1), num_processes=2, process_index=0)
    with pytest.raises(ValueError, match="rank 0 of 2 processes its share, and this is process 0 of 3"):
        prepare_data_loader(distributed(8, 0), num_processes=3, process_index=0)
    with pytest.warns(UserWarning, match="rank 1 of 2 processes its share, and this is process 0 of 1"):
        prepare_data_loader(distributed(8, 1))
    made = prepare_data_loader(distributed(8, 1), num_processes=2, process_index=0, already_sharded=True)
    assert len(made) == 1


def test_a_dataset_that_looks_like_a_share_is_told_of() -> None:
    data: Any = list(range(12))

    class OfRank(Stream):
        rank = 1

    class WithoutLength(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    shares: list[Any] = [Subset(data, range(1, 12, 2)), OfRank(0)]
    for dataset in shares:
        with pytest.warns(UserWarning, match=r"only 1 of 2 samples is read, .* already_sharded=True says"):
            prepare_data_loader(DataLoader(dataset, batch_size=2), num_processes=2, process_index=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for known in (True, False):
                prepare_data_loader(
                    DataLoader(dataset, batch_size=2), num_processes=2, process_index=1, already_sharded=known
                )
            for part in (Subset(data, range(6, 12)), Subset(WithoutLength(), range(6))):
                prepare_data_loader(DataLoader(part), num_processes=2, process_index=1)


def ranks_of(world: int, batch_size: int = 4) -> list[Any]:
    data: Any = torch.arange(90)
    return [
        prepare_data_loader(
            DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, world, rank, seed=3)),
            num_processes=world,
            process_index=rank,
        )
        for rank in range(world)
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_other_ranks_go_on_in_the_middle_of_an_epoch(world: int) -> None:
    first, second = ranks_of(2), ranks_of(world)
    readers = [iter(loader) for loader in first]
    seen = {number for _ in range(3) for reader in readers for number in next(reader).tolist()}
    state = position_of(first[0])
    for loader in second:
        go_to_position(loader, state)
    rest = [
        number for loader in second for batch in skip_first_batches(loader, 3) for number in batch.tolist()
    ]
    assert len(seen) == 24 and seen.isdisjoint(rest[:60]) and seen.union(rest) == set(range(90))
    others = ranks_of(2, batch_size=7)
    go_to_position(others[0], state)
    with pytest.raises(ValueError, match=r"where no batch of 14 starts"):
        skip_first_batches(others[0], 3)
