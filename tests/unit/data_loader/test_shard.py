"""Shares are a partition: in any world up to 4,096 processes, in every mode, nothing is lost and repeats are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from notebook_accel.data_loader import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler

MAX_STEPS = 150_000
"""Samples times processes that are iterated where every process walks all of them."""


class Numbers(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))

    def __len__(self) -> int:
        return self.n


class Pieces:
    """A batch sampler of the user's own."""

    def __init__(self, batches: list[list[int]], batch_size: int | None) -> None:
        self.batches, self.batch_size = batches, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def by_step(shares: list[list[list[int]]]) -> list[int]:
    """Return the samples of all shares, step by step and rank by rank."""
    rounds = itertools.zip_longest(*shares, fillvalue=[])
    return [index for parts in rounds for batch in parts for index in batch]


def expected(n: int, span: int, drop: bool, even: bool) -> list[int]:
    """Return what all ranks get together: the samples in order, and the documented repeats from the first."""
    if drop:
        return list(range(n - n % span))
    return list(range(n)) + [index % n for index in range(-n % span if even and n else 0)]


WORLDS = st.one_of(st.integers(1, 9), st.integers(1, 4096))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    world=WORLDS,
    rounds=st.floats(0, 3),
    share=st.integers(1, 5),
    drop=st.booleans(),
    split=st.booleans(),
    even=st.booleans(),
)
def test_batches(world: int, rounds: float, share: int, drop: bool, split: bool, even: bool) -> None:
    span = world * share
    n = int(rounds * span)
    batches = BatchSampler(SequentialSampler(range(n)), span if split else share, drop)
    shards = [BatchSamplerShard(batches, world, rank, split, even) for rank in range(world)]
    shares = [list(shard) for shard in shards]
    assert [len(share) for share in shares] == [len(shard) for shard in shards]
    assert by_step(shares) == expected(n, span, drop, even)
    if even or drop:
        assert {len(batch) for share in shares for batch in share} <= {share}
        assert len({len(share) for share in shares}) == 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(world=WORLDS, n=st.integers(0, 3000), size=st.integers(1, 5), split=st.booleans(), even=st.booleans())
def test_batches_of_a_sampler_that_must_be_walked(
    world: int, n: int, size: int, split: bool, even: bool
) -> None:
    n = min(n, MAX_STEPS // world)
    size = size * world if split else size
    whole = list(range(n))
    pieces = Pieces([whole[start : start + size] for start in range(0, n, size)], size)
    shares = [list(BatchSamplerShard(pieces, world, rank, split, even)) for rank in range(world)]
    assert by_step(shares) == expected(n, size if split else size * world, False, even)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(world=WORLDS, sizes=st.lists(st.integers(1, 4), max_size=90), even=st.booleans())
def test_batches_of_unknown_size_are_handed_out_whole(world: int, sizes: list[int], even: bool) -> None:
    pieces: Any = Pieces([[number] * size for number, size in enumerate(sizes)], None)
    shares = [list(BatchSamplerShard(pieces, world, rank, even_batches=even)) for rank in range(world)]
    rounds = itertools.zip_longest(*shares)
    together = [batch[0] for parts in rounds for batch in parts if batch is not None]
    assert together == expected(len(sizes), world, False, even)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(world=WORLDS, rounds=st.floats(0, 3), share=st.integers(1, 3), drop=st.booleans(), split=st.booleans())
def test_streams(world: int, rounds: float, share: int, drop: bool, split: bool) -> None:
    span = world * share
    n = min(int(rounds * span), MAX_STEPS // world)
    size = span if split else share
    shards = [IterableDatasetShard(Numbers(n), size, drop, world, rank, split) for rank in range(world)]
    shares = [list(shard) for shard in shards]
    assert [len(share) for share in shares] == [len(shard) for shard in shards]
    cut = [[samples[start : start + share] for start in range(0, len(samples), share)] for samples in shares]
    assert by_step(cut) == expected(n, span, drop, True)
    assert {shard.remainder for shard in shards} <= ({n % span, -1} if drop else {n % span})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 4096),
    rank=st.floats(0, 1, exclude_max=True),
    n=st.integers(0, 40_000),
    size=st.integers(1, 5),
    drop=st.booleans(),
    split=st.booleans(),
    even=st.booleans(),
    skipped=st.integers(0, 12),
)
def test_what_is_left_after_skipping(
    world: int, rank: float, n: int, size: int, drop: bool, split: bool, even: bool, skipped: int
) -> None:
    batches = BatchSampler(SequentialSampler(range(n)), size * world if split else size, drop)
    shard = BatchSamplerShard(batches, world, int(rank * world), split, even)
    for sampler in (shard, batches):
        left = SkipBatchSampler(SkipBatchSampler(sampler, skipped), 1)
        assert list(left) == list(sampler)[skipped + 1 :]
        assert len(left) == max(0, len(sampler) - skipped - 1)
