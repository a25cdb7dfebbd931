"""An epoch that other numbers of processes go on with: each sample is read once, in the order of the epoch."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from notebook_accel.accelerator import Accelerator
from notebook_accel.comm.single import SingleComm
from notebook_accel.data_loader import DataLoaderConfiguration, prepare_data_loader, skip_first_batches
from notebook_accel.data_loader.resume import go_to_position, position_of
from notebook_accel.parallelism import ParallelismConfig
from notebook_accel.runtime import Runtime
from notebook_accel.state import AcceleratorState
from notebook_accel.topology import Topology
from tests.unit.multiprocess import run_ranks

CPU = torch.device("cpu")
SAMPLES = 90


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return SAMPLES


class Backwards(BatchSampler):
    """A batch sampler of the user."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([SAMPLES - 1 - index for index in batch] for batch in super().__iter__())


class Varying(Sampler[list[int]]):
    """Batches of 1, 2, 3, 1, 2, 3 ... samples."""

    def __len__(self) -> int:
        return SAMPLES // 2

    def __iter__(self) -> Iterator[list[int]]:
        samples = iter(range(SAMPLES))
        for size in itertools.cycle((1, 2, 3)):
            batch = list(itertools.islice(samples, size))
            if not batch:
                return
            yield batch


def raw(kind: str, batch_size: int, drop_last: bool) -> Any:
    data: Any = list(range(SAMPLES))
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    if kind == "weighted":
        options["sampler"] = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)
    elif kind == "subset":
        options["sampler"] = SubsetRandomSampler(range(SAMPLES))
    elif kind == "generator":
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(7)}
    elif kind == "batches":
        options = {"batch_sampler": Backwards(SequentialSampler(data), batch_size, drop_last)}
    elif kind == "varying":
        options = {"batch_sampler": Varying()}
    elif kind == "single":
        options = {"batch_size": None, "shuffle": True}
    elif kind == "iterable":
        data = Numbers()
    elif kind == "sized iterable":
        data = SizedNumbers()
    else:
        options["shuffle"] = kind in ("shuffled", "seedable")
    return DataLoader(data, **options)


def loaders(
    world: int,
    kind: str,
    batch_size: int = 4,
    drop_last: bool = False,
    stateful: bool = False,
    **options: Any,
) -> list[Any]:
    """Return the loaders of all ranks, made as each of the ranks makes its own."""
    made = []
    for rank in range(world):
        torch.manual_seed(3)
        own = raw(kind, batch_size, drop_last)
        runtime = Runtime(topology=Topology(), device=CPU, comm=SingleComm())
        options |= {"use_seedable_sampler": kind == "seedable", "data_seed": 5, "runtime": runtime}
        made.append(prepare_data_loader(own, None, world, rank, use_stateful_dataloader=stateful, **options))
    return made


def read(iterators: list[Any], rounds: int | None = None) -> list[int]:
    """Return the samples that all ranks read in so many rounds, in the order of ranks in each."""
    seen: list[int] = []
    for _ in itertools.count() if rounds is None else range(rounds):
        batches = [next(iterator, None) for iterator in iterators]
        if batches[0] is None:
            break
        for batch in batches:
            if batch is not None:
                seen += torch.as_tensor(batch).flatten().tolist()
    return seen


def go_on(parts: list[Any], state: Any, num_batches: int) -> list[Any]:
    """Return the loaders that leave out the batches before a saved position, with another global generator."""
    torch.manual_seed(99)
    for part in parts:
        go_to_position(part, pickle.loads(state))
    return [skip_first_batches(part, num_batches) for part in parts]


KINDS = [
    "in order",
    "shuffled",
    "seedable",
    "generator",
    "weighted",
    "subset",
    "batches",
    "varying",
    "single",
    "iterable",
    "sized iterable",
]


OPTIONS: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {"even_batches": False},
    "split": {"split_batches": True, "batch_size": 12},
    "drop_last": {"drop_last": True},
}
NO_SIZE = ("varying", "single")  # their batches are no full ones, so none is split or dropped


@pytest.mark.parametrize(
    "worlds", [(2, 1, 2), (1, 2, 1), (2, 4, 2), (4, 2, 4), (1, 4, 2), (3, 2, 1)], ids=str
)
@pytest.mark.parametrize(
    ("option", "kind"),
    [
        (option, kind)
        for option in OPTIONS
        for kind in KINDS
        if option in ("even", "uneven") or kind not in NO_SIZE
    ],
)
def test_an_epoch_of_three_runs(worlds: tuple[int, int, int], kind: str, option: str) -> None:
    """The first run reads 3 batches, the second 2 more, the third the rest."""
    first, second, third = (loaders(world, kind, **OPTIONS[option]) for world in worlds)
    iterators = [iter(loader) for loader in first]
    seen = read(iterators, 3)
    state = pickle.dumps(position_of(first[0]))
    undisturbed = seen + read(iterators)
    go_on(second, state, 0)
    state = pickle.dumps(position_of(second[0]))  # a run may save again before it goes on
    seen += read([iter(loader) for loader in go_on(second, state, 3)], 2)
    state = pickle.dumps(position_of(second[0]))
    rest = go_on(third, state, 5)
    lengths = [len(part) for part in rest] if kind != "iterable" else None
    seen += read([iter(part) for part in rest])

    whole = min(len(seen), len(undisturbed), SAMPLES)
    assert seen[:whole] == undisturbed[:whole], "the order of the epoch"
    assert lengths is None or lengths == [part.batches_seen for part in rest]
    if option == "drop_last":
        assert len(set(seen)) == len(seen) > SAMPLES - 4 * worlds[2]
        return
    assert set(seen) == set(range(SAMPLES))
    repeats = len(seen) - SAMPLES
    evens = worlds[2] > 1 and (option != "uneven" or "iterable" in kind)
    assert evens or repeats == 0
    if kind not in NO_SIZE and evens:
        span = 12 if option == "split" else 4 * worlds[2]
        assert repeats == -rest[0].remainder % span, "metrics leave out what is repeated"


@pytest.mark.parametrize(("size", "kind"), [(8, "shuffled"), (8, "sized iterable"), (2, "batches")])
def test_another_batch_size(size: int, kind: str) -> None:
    first, second = loaders(2, kind), loaders(1, kind, batch_size=size)
    iterators = [iter(loader) for loader in first]
    seen = read(iterators, 3)
    state = pickle.dumps(position_of(first[0]))
    undisturbed = seen + read(iterators)
    assert seen + read([iter(loader) for loader in go_on(second, state, 3)]) == undisturbed[:SAMPLES]
    with pytest.raises(ValueError, match=r"no batch of 7 starts \(24 % 7 = 3\)"):
        go_on(loaders(1, kind, batch_size=7), state, 3)


def test_loaders_that_go_on_go_on_with_the_next_epoch() -> None:
    first, second = loaders(2, "generator"), loaders(1, "generator")
    iterators = [iter(loader) for loader in first]
    read(iterators, 3)
    state = pickle.dumps(position_of(first[0]))
    read(iterators)
    rest = go_on(second, state, 3)
    read([iter(rest[0])])
    expected = read([iter(loader) for loader in first])
    assert read([iter(second[0])]) == expected[:SAMPLES]
    assert position_of(second[0])["iteration"] == position_of(first[0])["iteration"] == 2


class Sharded(Numbers):
    """Stands for an iterable dataset of the datasets library with two files."""

    __module__ = "datasets.fake"
    n_shards = 2

    def shard(self, num_shards: int, index: int) -> Any:
        return self


class OwnOrder(Sampler[int]):
    """A sampler of the user that has a generator if `prepare` gives it one."""

    generator: torch.Generator | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


@pytest.mark.parametrize(
    ("dataset", "options", "worlds", "message"),
    [
        (
            Numbers(),
            {"num_workers": 2},
            (1, 2),
            "by 1 processes with num_workers=2, and this run has 2 processes",
        ),
        (
            Sharded(),
            {},
            (2, 1),
            "by 2 processes with num_workers=0, and this run has processes that read 4 samples",
        ),
        (list(range(SAMPLES)), {"sampler": OwnOrder()}, (1, 2), "does not fit"),
    ],
    ids=["loader processes", "own shards", "own sampler"],
)
def test_what_cannot_go_on_says_why(
    dataset: Any, options: Any, worlds: tuple[int, int], message: str
) -> None:
    first, second = (
        prepare_data_loader(DataLoader(dataset, batch_size=4, **options), None, world, 0) for world in worlds
    )
    state: Any = {"iteration": 0, "order": [{}, {"global": torch.get_rng_state()}]}
    state |= {"rounds": [(None, first.round_size)]}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        next(iter(go_on([second], pickle.dumps(state), 3)[0]))


def test_stateful_loaders_refuse() -> None:
    pytest.importorskip("torchdata")
    first, second = loaders(2, "in order"), loaders(1, "in order", stateful=True)
    read([iter(loader) for loader in first], 3)
    with pytest.raises(ValueError, match="Prepare it without use_stateful_dataloader"):
        go_on(second, pickle.dumps(position_of(first[0])), 3)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How a run reads."""

    kind: str = "shuffled"
    loading: dict[str, bool] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        return 12 if "split_batches" in self.loading else 4

    def prepare(self) -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**self.loading))
        torch.manual_seed(3)
        return accelerator, accelerator.prepare(raw(self.kind, self.batch_size, False))


RUNS = {
    "own shares": Reading(),
    "uneven": Reading(loading={"even_batches": False}),
    "split": Reading(loading={"split_batches": True}),
    "split, uneven": Reading(loading={"split_batches": True, "even_batches": False}),
    "seedable": Reading(loading={"use_seedable_sampler": True}),
    "iterable": Reading(kind="iterable", loading={"dispatch_batches": False}),
    "iterable, split": Reading(
        kind="sized iterable", loading={"dispatch_batches": False, "split_batches": True}
    ),
    "dispatched": Reading(loading={"dispatch_batches": True}),
    "dispatched, iterable": Reading(kind="iterable", loading={"dispatch_batches": True}),
    "dispatched, split": Reading(loading={"dispatch_batches": True, "split_batches": True}),
}
UNEVEN = ("uneven", "split, uneven")  # processes get different numbers of batches, so that they cannot gather


def begin(folder: str) -> dict[str, list[int]]:
    """Read 2 batches of an epoch, save a checkpoint and read the rest; return the own samples."""
    return {name: read_epoch(reading, f"{folder}/{name}", name) for name, reading in RUNS.items()}


def read_epoch(reading: Reading, where: str, name: str) -> list[int]:
    accelerator, loader = reading.prepare()
    seen: list[int] = []
    for number, batch in enumerate(loader, 1):
        seen += (batch if name in UNEVEN else accelerator.gather_for_metrics(batch)).tolist()
        if number == 2:
            accelerator.save_state(where)
    accelerator.free_memory()
    return seen


def continue_all(folders: list[str]) -> dict[tuple[str, str], list[int]]:
    """Read the rest of the epoch of every checkpoint, and return the own samples."""
    seen: dict[tuple[str, str], list[int]] = {}
    for folder, (name, reading) in itertools.product(folders, RUNS.items()):
        accelerator, loader = reading.prepare()
        accelerator.load_state(f"{folder}/{name}")
        samples: list[int] = []
        for batch in accelerator.skip_first_batches(loader, 2):
            samples += (batch if name in UNEVEN else accelerator.gather_for_metrics(batch)).tolist()
        seen[folder, name] = samples
        accelerator.free_memory()
    return seen


def on_ranks(function: Any, argument: Any, world: int) -> list[Any]:
    return run_ranks(function, argument, world_size=world) if world > 1 else [function(argument)]


def test_checkpoints_of_other_processes(tmp_path: Path, clean_runtime: None) -> None:
    """Saved by 1, 2, 3 and 4 processes, each checkpoint is gone on with by 1, 2 and 4."""
    folders = {world: str(tmp_path / str(world)) for world in (1, 2, 3, 4)}
    whole = {world: on_ranks(begin, folder, world) for world, folder in folders.items()}
    for target in (1, 2, 4):
        ranks = on_ranks(continue_all, list(folders.values()), target)
        for (source, folder), (name, reading) in itertools.product(folders.items(), RUNS.items()):
            case = f"{name}: {source} -> {target}"
            read_before = 2 * (12 if reading.batch_size == 12 else 4 * source)
            rest = [rank[folder, name] for rank in ranks]
            if name in UNEVEN:
                seen = [sample for rank in whole[source] for sample in rank[name]]
                assert sorted(seen) == list(range(SAMPLES)), case
                first = [rank[name][: read_before // source] for rank in whole[source]]
                assert sorted(itertools.chain(*first, *rest)) == list(range(SAMPLES)), case
                continue
            seen = whole[source][0][name]
            assert sorted(seen) == list(range(SAMPLES)), case
            assert rest == [seen[read_before:]] * target, case


def join_the_rest(folder: str) -> dict[str, list[int]]:
    """Read what is left of an epoch with the loop's own choice of `even_batches`."""
    seen: dict[str, list[int]] = {}
    for even in (True, False):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=not even))
        torch.manual_seed(3)
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1), raw("shuffled", 4, False))
        accelerator.load_state(folder)
        rest = accelerator.skip_first_batches(loader, 3)
        samples = []
        with accelerator.join_uneven_inputs([model], even_batches=even):
            for batch in rest:
                accelerator.backward(model(batch[:, None].float()).sum())
                samples += batch.tolist()
        assert rest.batch_sampler.even_batches is not even  # as before
        seen[str(even)] = samples
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_join_reaches_the_rest_of_an_epoch(tmp_path: Path, clean_runtime: None, world: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(3)
    _, loader = accelerator.prepare(torch.nn.Linear(1, 1), raw("shuffled", 4, False))
    whole: list[int] = []
    for number, batch in enumerate(loader, 1):
        whole += batch.tolist()
        if number == 3:
            accelerator.save_state(tmp_path / "kept")
    ranks = run_ranks(join_the_rest, str(tmp_path / "kept"), world_size=world)
    uneven = [sample for rank in ranks for sample in rank["False"]]
    assert sorted(uneven) == sorted(whole[12:])
    lengths = {len(rank["True"]) for rank in ranks}
    assert lengths == {-(-len(whole[12:]) // (4 * world)) * 4}


def go_on_with_other_shares(folder: Path) -> list[int]:
    """Save by two processes with different data, and return what two read that share each weight, and so the data."""
    options: dict[str, Any] = {
        "cpu": True,
        "dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True),
    }
    first = Accelerator(**options)
    epoch = iter(first.prepare(DataLoader(list(range(12)), batch_size=2)))
    next(epoch)
    first.save_state(folder)
    AcceleratorState._reset_state()
    second = Accelerator(**options, parallelism_config=ParallelismConfig(tp_size=2))
    loader = second.prepare(DataLoader(list(range(12)), batch_size=2))
    with pytest.warns(
        UserWarning, match="saved by 2 processes, not by 2 processes with 1 shares of the data"
    ):
        second.load_state(folder)
    return [int(sample) for batch in loader for sample in batch]


def test_stateful_loaders_with_other_shares_begin_anew(tmp_path: Path) -> None:
    assert run_ranks(go_on_with_other_shares, tmp_path) == [list(range(12))] * 2
