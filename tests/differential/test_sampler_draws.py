"""Orders of samplers that have no generator: those of Accelerate where ranks are alike, rank 0's where they are not."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from tests.unit.multiprocess import run_ranks

pytest.importorskip("accelerate.data_loader", reason="Accelerate is what orders are compared with")

SAMPLES = 20  # no short batch: Accelerate loses samples where one is not the last
SEEDS = {"alike": (7, 7), "unlike": (7, 8)}


class Own(Sampler[int]):
    """A sampler of the user's own, which knows nothing of generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES).tolist())


class Grouped(Own):
    """Has the attribute, as the sampler has by which Trainer groups lengths."""

    generator: torch.Generator | None = None

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(SAMPLES, generator=self.generator).tolist()
        return iter(sorted(order, key=lambda index: index % 3))


class Turned(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(list(super().__iter__())[::-1])


class Shuffled(BatchSampler):
    """Torch's batches in another order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = list(super().__iter__())
        return iter([batches[place] for place in torch.randperm(len(batches))])


SAMPLERS: dict[str, Any] = {
    "own": Own,
    "grouped": Grouped,
    "turned": lambda: Turned(range(SAMPLES)),
    "random": lambda: RandomSampler(range(SAMPLES)),
    "weighted": lambda: WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False),
    "subset": lambda: SubsetRandomSampler(range(SAMPLES)),
    "batches": lambda: Shuffled(SequentialSampler(range(SAMPLES)), 4, False),
    "batches of own": lambda: Shuffled(Own(), 4, False),
    "given": lambda: BatchSampler(Own(), 4, False),
}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"use_seedable_sampler": True},
    {"use_seedable_sampler": True, "split_batches": True},
    {"use_seedable_sampler": True, "even_batches": False},
    {"use_seedable_sampler": True, "dispatch_batches": True},
    {"dispatch_batches": True, "split_batches": True},
]
CASES = [
    (name, config, workers)
    for name, config, workers in (
        *itertools.product(SAMPLERS, CONFIGS, [0]),
        *itertools.product(SAMPLERS, CONFIGS[1:2], [1]),
    )
    if name != "turned"
    or "use_seedable_sampler" not in config  # Accelerate replaces it, and its order is lost
]


def load(name: str, workers: int) -> DataLoader[Any]:
    data: Any = list(range(SAMPLES))
    sampler = SAMPLERS[name]()
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": torch.tensor}
    if workers:
        options["multiprocessing_context"] = "fork"
    if isinstance(sampler, BatchSampler):
        return DataLoader(data, batch_sampler=sampler, **options)
    return DataLoader(data, 4, sampler=sampler, **options)


def observe(library: str, case: tuple[str, dict[str, Any], int], seed: int, *, twice: bool) -> Any:
    """Return the batches of two epochs, and what became of the global generator after each."""
    name, config, workers = case
    module, utils = importlib.import_module(library), importlib.import_module(f"{library}.utils")
    accelerator = module.Accelerator(
        cpu=True, dataloader_config=utils.DataLoaderConfiguration(data_seed=3, **config)
    )
    torch.manual_seed(seed)
    raw = load(name, workers)
    loader = accelerator.prepare(accelerator.prepare(raw) if twice else raw)
    if twice and name == "own":  # the same loader of torch, once more
        loader = accelerator.prepare(raw)
    epochs = []
    for _ in range(2):
        batches = []
        for batch in loader:
            batches.append(batch.tolist())
            if config.get("even_batches", True):  # else Accelerate's ranks are no longer alike
                torch.rand(1)  # as dropout does
        state = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        epochs.append((batches, state))
    return epochs


def look(seeds: tuple[int, int]) -> list[dict[str, Any]]:
    """Return what each library shows of every case, Accelerate only where ranks are alike."""
    seed, alike = seeds[int(os.environ["RANK"])], len(set(seeds)) == 1
    seen = []
    for case in CASES:
        views = {"ours": observe("notebook_accel", case, seed, twice=False)}
        if alike:
            views["theirs"] = observe("accelerate", case, seed, twice=False)
            views["twice"] = observe("notebook_accel", case, seed, twice=True)
        seen.append(views)
    return seen


@pytest.fixture(scope="module")
def pair() -> list[list[dict[str, Any]]]:
    """What two ranks that are alike show."""
    return run_ranks(look, SEEDS["alike"], world_size=2, timeout=200, starts_others=True)


@pytest.mark.parametrize("world", [1, 2])
def test_orders_and_draws_are_those_of_accelerate(world: int, request: pytest.FixtureRequest) -> None:
    if world == 2:
        ranks = request.getfixturevalue("pair")
    else:
        ranks = run_ranks(look, SEEDS["alike"], world_size=1, timeout=200, starts_others=True)
    for rank, number in itertools.product(range(world), range(len(CASES))):
        views = ranks[rank][number]
        assert views["ours"] == views["theirs"], (rank, CASES[number])
        assert views["twice"] == views["ours"], (rank, CASES[number])


def test_ranks_that_differ_draw_what_rank_0_draws(pair: list[list[dict[str, Any]]]) -> None:
    unlike = run_ranks(look, SEEDS["unlike"], world_size=2, timeout=200, starts_others=True)
    for rank, number in itertools.product(range(2), range(len(CASES))):
        found, expected = unlike[rank][number]["ours"], pair[rank][number]["ours"]
        assert [batches for batches, _ in found] == [batches for batches, _ in expected], (
            rank,
            CASES[number],
        )
        states = [[state for _, state in epochs] for epochs in (found, expected)]
        assert (states[0] == states[1]) == (rank == 0), "each rank keeps random numbers of its own"
