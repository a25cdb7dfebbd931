"""Samplers without a generator: all ranks draw the order that rank 0 draws, in worlds of any size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from notebook_accel.comm.single import SingleComm
from notebook_accel.data_loader import prepare_data_loader, skip_first_batches
from notebook_accel.data_loader.lead import Lead
from notebook_accel.data_loader.resume import go_to_position, position_of
from notebook_accel.runtime import Runtime
from notebook_accel.topology import Topology

CPU = torch.device("cpu")


class ReplayedComm(SingleComm):
    """Rank 0 goes first and its broadcasts are kept; each other rank receives them.

    Args:
        rank: of this process.
        world_size: number of ranks.
        sent: what rank 0 broadcast.
    """

    def __init__(self, rank: int, world_size: int, sent: list[torch.Tensor]) -> None:
        super().__init__()
        self.rank, self.world_size, self.sent = rank, world_size, sent
        self.received = 0

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        if self.rank == 0:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent[self.received])
        self.received += 1
        return tensor


class Slow(Sampler[int]):
    """Draws each index when it is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(10_000, ()))


class AtOnce(Slow):
    """Draws all indices before the first one is asked for."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Turned(BatchSampler):
    """Draws whether batches are turned round, in an order that draws nothing."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] if torch.rand(()) < 0.5 else batch for batch in super().__iter__())


class Whole(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def make_loader(kind: str, n: int, size: int) -> DataLoader[int]:
    data: Any = Whole(n)
    if kind == "turned":
        return DataLoader(data, batch_sampler=Turned(SequentialSampler(data), size, False))
    samplers: dict[str, Any] = {
        "slow": lambda: Slow(n),
        "at once": lambda: AtOnce(n),
        "weighted": lambda: WeightedRandomSampler([1.0] * n, n),
        "subset": lambda: SubsetRandomSampler(range(n)),
    }
    return DataLoader(data, size, sampler=samplers[kind]())


KINDS = ("slow", "at once", "weighted", "subset", "turned")


@dataclass
class Rank:
    """A rank with a global generator of its own, which is only in use while it works."""

    comm: ReplayedComm
    state: torch.Tensor
    loader: Any

    def read(self, loader: Any = None) -> list[list[int]]:
        """Read a loader, by default its own, with draws of the user's between the batches except on rank 0."""
        torch.set_rng_state(self.state)
        seen = []
        for batch in self.loader if loader is None else loader:
            seen.append(batch.tolist())
            torch.rand(self.comm.rank)
        self.state = torch.get_rng_state()
        return seen


def make_ranks(world: int, seeds: list[int], kind: str, n: int, size: int, **options: Any) -> list[Rank]:
    sent: list[torch.Tensor] = []
    ranks = []
    for rank in range(world):
        comm = ReplayedComm(rank, world, sent)
        torch.manual_seed(seeds[rank])
        place = Topology(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
        loader = prepare_data_loader(
            make_loader(kind, n, size),
            use_seedable_sampler=True,
            runtime=Runtime(topology=place, device=CPU, comm=comm),
            **options,
        )
        ranks.append(Rank(comm, torch.get_rng_state(), loader))
    return ranks


def read_alone(kind: str, n: int, size: int, seed: int, epochs: int) -> tuple[list[Any], torch.Tensor]:
    """Return what torch's loader reads in a process alone, and where its generator ends."""
    torch.manual_seed(seed)
    loader = make_loader(kind, n, size)
    read = [[batch.tolist() for batch in loader] for _ in range(epochs)]
    return read, torch.get_rng_state()


SEEDS = st.lists(st.integers(0, 2**32), min_size=9, max_size=9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(world=st.integers(2, 9), seeds=SEEDS, kind=st.sampled_from(KINDS), n=st.integers(1, 60))
def test_ranks_share_the_order_of_rank_0(world: int, seeds: list[int], kind: str, n: int) -> None:
    size = 3
    alone, end = read_alone(kind, n, size, seeds[0], epochs=2)
    ranks = make_ranks(world, seeds, kind, n, size, even_batches=False)
    for epoch in range(2):
        shares = [rank.read() for rank in ranks]
        rounds = itertools.zip_longest(*shares)
        assert [batch for batches in rounds for batch in batches if batch is not None] == alone[epoch]
        received = {rank.comm.received for rank in ranks}
        assert len(received) == 1 and received <= set(range(epoch + 2)), (
            "a broadcast for each epoch that is drawn"
        )
    assert torch.equal(ranks[0].state, end), "rank 0 has drawn as a process alone does"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    world=st.integers(2, 6), kind=st.sampled_from(KINDS), rounds=st.integers(1, 4), saver=st.integers(0, 5)
)
def test_another_run_goes_on_in_the_order(world: int, kind: str, rounds: int, saver: int) -> None:
    n, size = world * 12, 2
    seen, states = [], []
    for rank in make_ranks(world, list(range(world)), kind, n, size):
        batches = iter(rank.loader)
        seen.append([next(batches).tolist() for _ in range(rounds)])
        states.append(position_of(rank.loader))
        seen[-1] += [batch.tolist() for batch in batches]
    for rank in make_ranks(world, [50 + rank for rank in range(world)], kind, n, size):
        before = rank.state
        go_to_position(rank.loader, states[saver % world])
        rest = rank.read(skip_first_batches(rank.loader, rounds))
        assert rest == seen[rank.comm.rank][rounds:]
        assert rank.comm.received == 0, "the saved order needs no broadcast"
        assert rank.comm.rank > 0 or torch.equal(rank.state, before), "the first run has drawn the order"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(world=st.integers(2, 6), kind=st.sampled_from(KINDS), seeds=SEEDS)
def test_a_loader_that_is_prepared_again_draws_the_same(world: int, kind: str, seeds: list[int]) -> None:
    n, size = 24, 2
    once = make_ranks(world, seeds, kind, n, size)
    twice = make_ranks(world, seeds, kind, n, size)
    for rank in twice:
        torch.set_rng_state(rank.state)
        raw = make_loader(kind, n, size)
        for _ in range(2):
            rank.loader = prepare_data_loader(raw, use_seedable_sampler=True, runtime=rank.loader.runtime)
        assert torch.equal(torch.get_rng_state(), rank.state)
    for one, other in zip(once, twice, strict=True):
        assert one.read() == other.read()
        assert torch.equal(one.state, other.state)


def test_a_state_of_its_own_comes_back() -> None:
    torch.manual_seed(1)
    common = torch.get_rng_state()
    first = torch.rand(3)
    torch.manual_seed(2)
    own = torch.get_rng_state()
    lead = Lead(common)
    with lead:
        drawn = [torch.rand(1)]
    assert torch.equal(torch.get_rng_state(), own)
    with lead:
        drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), first)


def test_a_state_that_is_the_common_one_goes_on() -> None:
    torch.manual_seed(1)
    lead = Lead(torch.get_rng_state())
    with lead:
        torch.rand(1)
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2)[1:], after)


def test_a_failure_gives_the_state_back() -> None:
    torch.manual_seed(1)
    lead = Lead(torch.get_rng_state())
    torch.manual_seed(2)
    own = torch.get_rng_state()
    with pytest.raises(KeyError), lead:
        raise KeyError
    assert torch.equal(torch.get_rng_state(), own)


class Fixed(Slow):
    """Draws nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def test_a_sampler_that_draws_nothing_sends_nothing() -> None:
    """One rank may look at a batch, as main processes do."""
    sent: list[torch.Tensor] = []
    place = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2)
    loader = prepare_data_loader(
        DataLoader(Whole(8), 2, sampler=Fixed(8)),
        use_seedable_sampler=True,
        runtime=Runtime(topology=place, device=CPU, comm=ReplayedComm(1, 2, sent)),
        put_on_device=False,
    )
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]  # rank 1 has received nothing


class Numpy(BatchSampler):
    """Draws at once, from a generator of its own."""

    def __init__(self) -> None:
        self.generator_of_numpy = np.random.default_rng(0)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.generator_of_numpy.permutation(8).reshape(-1, 2).tolist())


class Late(Numpy):
    """Makes its generator when it is iterated."""

    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[list[int]]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(3)
        return iter(torch.randperm(8, generator=self.generator).reshape(-1, 2).tolist())


class Items:
    """Batches by their numbers, as torch takes them too."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> list[int]:
        if number >= 4:
            raise IndexError(number)
        return [2 * number, 2 * number + 1]


@pytest.mark.parametrize("kind", [Numpy, Late, Items])
def test_batch_samplers_of_any_kind(kind: Any) -> None:
    def make() -> Any:
        return DataLoader(Whole(8), batch_sampler=kind())

    expected = [batch.tolist() for batch in make()]
    assert [batch.tolist() for batch in prepare_data_loader(make())] == expected


def test_a_sampler_with_a_generator_of_its_own_is_iterated_once_where_an_epoch_goes_on() -> None:
    pytest.importorskip("torchdata")

    def make() -> Any:
        return prepare_data_loader(DataLoader(Whole(8), batch_sampler=Numpy()), use_stateful_dataloader=True)

    loader = make()
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in batches]
    other = make()
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == rest
