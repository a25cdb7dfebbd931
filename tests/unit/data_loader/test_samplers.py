"""Sharded samplers: every index exactly once, the order of Accelerate, and no work for other ranks."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from notebook_accel.data_loader import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from notebook_accel.data_loader.indices import RandomIndices


class Opaque:
    """A batch sampler of the user's own: nothing is known about what it iterates."""

    def __init__(self, batches: Any, batch_size: int | None = None, drop_last: bool = False) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_sampler(kind: str, n: int, generator: torch.Generator | None) -> Sampler[int]:
    source = range(n)
    if kind == "sequential":
        return SequentialSampler(source)
    if kind == "random":
        return RandomSampler(source, generator=generator)
    if kind == "unseeded":
        return RandomSampler(source)
    if kind == "longer":
        return RandomSampler(source, num_samples=2 * n + 3, generator=generator)
    if kind == "twice":
        return RandomSampler(source, num_samples=2 * n, generator=generator)
    if kind == "replacement":
        return RandomSampler(source, replacement=True, num_samples=n + 40, generator=generator)
    if kind == "weighted":
        return WeightedRandomSampler([1.0] * n, n, generator=generator)
    return SubsetRandomSampler(range(n), generator=generator)


def epochs_of(kind: Any, batch_sampler: Any, generator: torch.Generator, *args: Any) -> list[Any]:
    """Two epochs, one that is left after a batch, one more, and where the generators end up."""
    shard = kind(batch_sampler, *args)
    epochs: list[Any] = [list(shard), list(shard)]
    iterator = iter(shard)
    next(iterator, None)
    del iterator
    state = generator.get_state(), torch.get_rng_state()
    return [*epochs, list(shard), *(numbers[:40].tolist() for numbers in state)]


KINDS = ["sequential", "random", "unseeded", "longer", "twice", "replacement", "weighted", "subset"]


@pytest.mark.parametrize("opaque", [False, True], ids=["plain", "opaque"])
@pytest.mark.parametrize("kind", KINDS)
def test_order_and_draws_are_those_of_accelerate(kind: str, opaque: bool) -> None:
    reference = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    sizes = [1, 2, 7, 12, 24, 25] if kind != "sequential" else [0, 1, 2, 3, 5, 7, 8, 12, 16, 17, 24, 25]
    flags = [False, True]
    for n, batch_size, world, drop, split, even in itertools.product(
        sizes, [1, 3, 4], [1, 2, 3, 4], flags, flags, flags
    ):
        if split and batch_size % world:
            continue
        for rank in {0, world // 2, world - 1}:
            results = []
            for shard in (reference, BatchSamplerShard):
                torch.manual_seed(n)
                generator = seeded(n)
                batches: Any = BatchSampler(make_sampler(kind, n, generator), batch_size, drop)
                batches = Opaque(batches, batch_size, drop) if opaque else batches
                results.append(epochs_of(shard, batches, generator, world, rank, split, even))
            assert results[0] == results[1], (n, batch_size, world, rank, drop, split, even)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 4096),
    rounds=st.floats(0, 3),
    batch_size=st.integers(1, 9),
    even=st.booleans(),
    shuffle=st.booleans(),
)
def test_shares_are_a_partition(
    world: int, rounds: float, batch_size: int, even: bool, shuffle: bool
) -> None:
    n = max(1, int(rounds * world * batch_size))
    kind = "random" if shuffle and n * world < 2_000_000 else "sequential"
    shares = []
    for rank in range(world):
        batches = BatchSampler(make_sampler(kind, n, seeded()), batch_size, False)
        shard = BatchSamplerShard(batches, world, rank, even_batches=even)
        share = list(shard)
        assert len(share) == len(shard)
        shares.append(share)
    times = Counter(index for share in shares for batch in share for index in batch)
    assert set(times) == set(range(n))
    if even:
        span = world * batch_size
        assert times.total() == -(-n // span) * span
        assert {len(batch) for share in shares for batch in share} == {batch_size}
        assert max(times.values()) - min(times.values()) <= 1
    else:
        assert set(times.values()) == {1}
        assert len({len(share) for share in shares}) <= 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 64),
    share=st.integers(1, 4),
    n=st.integers(0, 2000),
    even=st.booleans(),
    drop=st.booleans(),
)
def test_split_batches_are_a_partition(world: int, share: int, n: int, even: bool, drop: bool) -> None:
    batches = BatchSampler(SequentialSampler(range(n)), share * world, drop)
    shards = [BatchSamplerShard(batches, world, rank, True, even) for rank in range(world)]
    shares = [list(shard) for shard in shards]
    assert [len(share) for share in shares] == [len(shard) for shard in shards]
    whole = n - n % (share * world) if drop else n
    together = [
        list(itertools.chain(*(batch for batch in parts if batch is not None)))
        for parts in itertools.zip_longest(*shares)
    ]
    flat = [index for batch in together for index in batch]
    assert flat[:whole] == list(range(whole))
    repeats = [index % n for index in range(whole, len(flat))]
    assert flat[whole:] == repeats
    assert even or not repeats


def test_a_rank_computes_its_own_share_only() -> None:
    n, world = 10**12, 4096
    batches = BatchSampler(SequentialSampler(range(n)), 4, False)
    shard = BatchSamplerShard(batches, world, 7)
    assert list(itertools.islice(shard, 2)) == [[28, 29, 30, 31], [16412, 16413, 16414, 16415]]
    assert len(shard) == -(-n // (4 * world))


def test_samplers_with_an_iter_of_their_own_are_iterated() -> None:
    class Reversed(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self.data_source) - 1, -1, -1))

    shard = BatchSamplerShard(BatchSampler(Reversed(range(8)), 2, False), 2, 1)
    assert list(shard) == [[5, 4], [1, 0]]


def test_batches_of_varying_size_are_handed_out_whole() -> None:
    batches = [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9, 10, 11], [12, 13]]
    uneven = [list(BatchSamplerShard(batches, 2, rank, even_batches=False)) for rank in range(2)]
    assert uneven == [[[0, 1, 2], [5, 6, 7, 8], [12, 13]], [[3, 4], [9, 10, 11]]]
    even = [list(BatchSamplerShard(batches, 2, rank)) for rank in range(2)]
    assert even[1][-1] == [0, 1, 2]


def test_no_batch_is_lost_where_a_short_one_stands_in_the_middle() -> None:
    batches = Opaque([[0, 1], [2], [3, 4], [5, 6]], batch_size=2)
    shares = [list(BatchSamplerShard(batches, 2, rank)) for rank in range(2)]
    assert shares == [[[0, 1], [3, 4]], [[2, 0], [5, 6]]]
    split = [list(BatchSamplerShard(batches, 2, rank, True)) for rank in range(2)]
    assert split == [[[0], [2], [3], [5]], [[1], [0], [4], [6]]]


def test_errors_show_the_numbers() -> None:
    with pytest.raises(ValueError, match="5 % 2 = 1"):
        BatchSamplerShard(BatchSampler(range(10), 5, False), 2, 0, split_batches=True)
    with pytest.raises(ValueError, match="batch_size attribute"):
        BatchSamplerShard([[0, 1]], 2, 0, split_batches=True)
    too_long = BatchSamplerShard(Opaque([[0, 1, 2]], batch_size=2), 2, 0, split_batches=True)
    with pytest.raises(ValueError, match="batch of 3 indices"):
        list(too_long)


def test_seedable_sampler_depends_on_seed_and_epoch_alone() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=3)
    first, second = list(sampler), list(sampler)
    assert sampler.epoch == 2
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    torch.manual_seed(99)
    again = SeedableRandomSampler(range(20), data_seed=3)
    again.set_epoch(1)
    assert list(again) == second
    torch.manual_seed(3)
    assert list(SeedableRandomSampler(range(20))) == first


def test_seedable_sampler_is_sharded_alike() -> None:
    sampler = SeedableRandomSampler(range(22), data_seed=1)
    expected = [list(sampler), list(sampler)]
    for rank in range(2):
        sharded = SeedableRandomSampler(range(22), data_seed=1)
        shard = BatchSamplerShard(BatchSampler(sharded, 3, False), 2, rank)
        for epoch, order in enumerate(expected):
            assert sharded.epoch == epoch
            got = list(shard)
            assert got[0] == order[3 * rank : 3 * rank + 3]
            assert len(got) == 4
        assert sharded.epoch == 2


def test_random_indices_draw_what_torch_draws_in_any_type() -> None:
    for n in (1, 2, 31, 1000, 70_000):
        ours, theirs = seeded(n), seeded(n)
        indices = RandomIndices(RandomSampler(range(n), generator=ours))
        assert indices.take(0, n, n) == list(RandomSampler(range(n), generator=theirs))
        indices.finish()
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_skip_batch_sampler() -> None:
    inner = BatchSampler(SequentialSampler(range(10)), 3, False)
    skip = SkipBatchSampler(inner, 2)
    assert list(skip) == [[6, 7, 8], [9]]
    assert (len(skip), skip.total_length, skip.batch_size, skip.drop_last) == (2, 4, 3, False)
    assert len(SkipBatchSampler(inner, 9)) == 0
    assert skip.sampler is inner.sampler


def test_shards_pickle() -> None:
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(10)), 3, False), 2, 1)
    assert list(pickle.loads(pickle.dumps(shard))) == list(shard)
