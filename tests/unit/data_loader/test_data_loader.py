"""Prepared data loaders: what each rank reads, where a loader stands, and what is kept of the user's own."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from notebook_accel import runtime as process
from notebook_accel.comm.single import SingleComm
from notebook_accel.comm.torch_dist import TorchComm, open_group
from notebook_accel.data_loader import (
    DataLoaderConfiguration,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_accel.runtime import Runtime
from notebook_accel.topology import Topology, from_environ
from tests.unit.clock import wait_until
from tests.unit.multiprocess import run_ranks

CPU = torch.device("cpu")


class Numbers(IterableDataset[int]):
    """The numbers below n, without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class SizedNumbers(Numbers):
    def __len__(self) -> int:
        return self.n


class Shuffled(SizedNumbers):
    """Numbers in the order of a generator of their own."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class Mesh:
    """A device mesh of the given sizes."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.mesh_dim_names = tuple(sizes)

    def __getitem__(self, name: str) -> Any:
        return types.SimpleNamespace(size=lambda: self.sizes[name])


def install_gloo() -> int:
    """Install the runtime of a rank and return the rank."""
    topology = from_environ()
    open_group(topology, "gloo", device=CPU)
    process.install(Runtime(topology=topology, device=CPU, comm=TorchComm(CPU)))
    return topology.rank


@pytest.fixture
def alone() -> Runtime:
    return Runtime(topology=Topology(), device=CPU, comm=SingleComm())


def load(data: Any, **options: Any) -> Any:
    """Return torch's loader, whose types ask for more than it needs."""
    return DataLoader(data, **options)


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def shares(loader: DataLoader[Any], world: int, **options: Any) -> list[Any]:
    return [
        prepare_data_loader(loader, num_processes=world, process_index=rank, **options)
        for rank in range(world)
    ]


def gathered(loaders: list[Any]) -> tuple[list[list[int]], list[int]]:
    """Return the batches of each rank by step, joined, the last one cut to its remainder as metrics do."""
    steps, ends = [], []
    for parts in zip(*loaders, strict=True):
        step = [int(number) for part in parts for number in part]
        if loaders[0].end_of_dataloader:
            remainders = {loader.remainder for loader in loaders}
            assert len(remainders) == 1
            (remainder,) = remainders
            ends.append(remainder)
            step = step[:remainder] if remainder > 0 else step
        steps.append(step)
    return steps, ends


@pytest.mark.parametrize("kind", ["map", "sized", "unsized"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_metrics_see_every_sample_once(kind: str, split: bool) -> None:
    for world, n, size in itertools.product((1, 2, 3, 5), (0, 1, 2, 7, 12, 30, 31), (1, 4)):
        dataset: Any = {"map": range, "sized": SizedNumbers, "unsized": Numbers}[kind](n)
        loader = load(dataset, batch_size=size * world if split else size)
        loaders = shares(loader, world, split_batches=split)
        steps, ends = gathered(loaders)
        assert [number for step in steps for number in step] == list(range(n)), (world, n, size)
        assert len(ends) == bool(n)
        if kind != "unsized":
            assert {len(each) for each in loaders} == {len(steps)}
            assert loaders[0].total_dataset_length == n
        assert loaders[0].total_batch_size == size * world


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("iterable", [False, True], ids=["map", "iterable"])
def test_batches_and_remainder_are_those_of_accelerate(iterable: bool, split: bool, drop: bool) -> None:
    reference = pytest.importorskip("accelerate.data_loader").prepare_data_loader
    for world, n, even in itertools.product((1, 2, 4), (1, 5, 16, 22), (True, False)):
        dataset: Any = SizedNumbers(n) if iterable else range(n)
        loader = load(dataset, batch_size=4, drop_last=drop)
        for rank in range(world):
            options = {"split_batches": split, "even_batches": even}
            ours: Any = prepare_data_loader(loader, None, world, rank, **options)  # type: ignore[arg-type]
            theirs = reference(loader, None, world, rank, **options)
            seen: list[Any] = []
            expected: list[Any] = []
            for name, each in ((seen, ours), (expected, theirs)):
                name.extend((batch.tolist(), each.end_of_dataloader) for batch in each)
            assert seen == expected, (world, n, even, rank)
            if not iterable:
                assert ours.remainder == theirs.remainder
                assert ours.total_batch_size == theirs.total_batch_size


def test_end_is_known_on_the_last_batch_and_flags_follow(alone: Runtime) -> None:
    loader: Any = prepare_data_loader(load(range(5), batch_size=2), runtime=alone)
    seen = [(alone.gradient.end_of_dataloader, alone.gradient.remainder) for _ in loader]
    assert seen == [(False, 1), (False, 1), (True, 1)]
    assert alone.gradient.active is None
    assert loader.iteration == 1


def test_a_loader_left_early_stays_active_until_the_next_begins(alone: Runtime) -> None:
    first: Any = prepare_data_loader(load(range(3), batch_size=5), runtime=alone)
    second: Any = prepare_data_loader(load(range(8), batch_size=2), runtime=alone)
    next(iter(first))
    assert alone.gradient.end_of_dataloader
    assert alone.gradient.remainder == 3
    assert first.iteration == 0
    for _ in second:
        assert alone.gradient.active is second
    assert alone.gradient.active is None


def test_loaders_that_are_left_and_forgotten_leave_nothing(alone: Runtime) -> None:
    for _ in range(5):
        next(iter(prepare_data_loader(load(range(3)), runtime=alone)))
        gc.collect()
    assert len(alone.gradient.iterations) == 1


def test_loaders_nest(alone: Runtime) -> None:
    outer: Any = prepare_data_loader(load(range(2)), runtime=alone)
    inner: Any = prepare_data_loader(load(range(2)), runtime=alone)
    for _ in outer:
        for _ in inner:
            assert alone.gradient.active is inner
        assert alone.gradient.active is outer


@pytest.mark.parametrize("world", [1, 2])
def test_shuffling_is_alike_on_all_ranks_and_differs_by_epoch(world: int) -> None:
    loader = load(range(12), batch_size=3, shuffle=True)
    loaders = shares(loader, world, use_seedable_sampler=True, data_seed=5)
    epochs = [gathered(loaders)[0] for _ in range(2)]
    assert sorted(itertools.chain(*epochs[0])) == sorted(itertools.chain(*epochs[1])) == list(range(12))
    assert epochs[0] != epochs[1]
    for each in loaders:
        each.set_epoch(0)
    assert gathered(loaders)[0] == epochs[0]
    assert isinstance(loaders[0].get_sampler(), SeedableRandomSampler)
    assert type(loader.sampler) is RandomSampler


def test_rng_states_are_synchronised_at_each_epoch(alone: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def note(kinds: list[str], generator: Any, *, runtime: Any) -> None:
        assert runtime is alone
        calls.append((list(kinds), generator))

    monkeypatch.setattr("notebook_accel.data_loader.shard.synchronize_rng_states", note)
    kinds = ["torch", "generator"]
    loader = load(range(8), batch_size=2, shuffle=True)
    prepared: Any = prepare_data_loader(loader, None, 2, 1, rng_types=kinds, runtime=alone)
    list(prepared)
    list(prepared)
    assert calls == [(kinds, loader.sampler.generator)] * 2
    plain: Any = prepare_data_loader(load(range(8)), None, 2, 1, rng_types=kinds, runtime=alone)
    list(plain)
    assert calls[-1] == (["torch"], None)
    assert kinds == ["torch", "generator"]


def test_iterable_generator_is_seeded_by_the_epoch() -> None:
    loaders = shares(load(Shuffled(9), batch_size=2), 2)
    epochs = [gathered(loaders)[0] for _ in range(2)]
    assert sorted(itertools.chain(*epochs[0])) == list(range(9))
    assert epochs[0] != epochs[1]
    assert loaders[0].synchronized_generator is loaders[0].dataset.dataset.generator


def test_iterable_shard_length_counts_what_it_yields() -> None:
    for n, size, world, split, drop in itertools.product(
        (0, 1, 7, 16, 17), (2, 4), (1, 2), (False, True), (False, True)
    ):
        for rank in range(world):
            shard = IterableDatasetShard(SizedNumbers(n), size, drop, world, rank, split)
            assert len(shard) == len(list(shard))
    with pytest.raises(ValueError, match="3 % 2 = 1"):
        IterableDatasetShard(Numbers(4), 3, num_processes=2, split_batches=True)


def test_options_of_the_loader_are_kept() -> None:
    def collate(samples: list[int]) -> list[str]:
        return [str(sample) for sample in samples]

    generator = torch.Generator()
    loader = load(
        range(10),
        batch_size=2,
        num_workers=2,
        collate_fn=collate,
        worker_init_fn=print,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=7,
        generator=generator,
        in_order=False,
    )
    prepared = prepare_data_loader(loader, num_processes=2, process_index=0)
    for name in ("num_workers", "collate_fn", "worker_init_fn", "persistent_workers", "prefetch_factor"):
        assert getattr(prepared, name) == getattr(loader, name)
    assert (prepared.timeout, prepared.generator, prepared.in_order) == (7, generator, False)
    assert isinstance(prepared, DataLoader)


class Failing(TensorDataset):
    """Has no sample 5; 7 kills the process that reads it."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no sample 5")
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
@pytest.mark.parametrize("is_stateful", [False, True])
@pytest.mark.parametrize("first", [4, 6])
def test_an_error_that_is_kept_keeps_no_loader_processes(first: int, is_stateful: bool) -> None:
    order = [0, 1, first, first + 1, 2, 3]
    prepared = prepare_data_loader(
        load(Failing(torch.arange(8)), batch_size=2, sampler=order, num_workers=2, prefetch_factor=1),
        use_stateful_dataloader=is_stateful,
    )
    for _ in range(2):  # and the loader can be read again
        with pytest.raises(
            (ValueError, RuntimeError), match=r"no sample 5|killed by signal|exited unexpectedly"
        ) as error:
            list(prepared)
        assert error.value.__traceback__ is not None
        wait_until(lambda: not multiprocessing.active_children())


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_an_iterator_that_fails_while_it_is_made_keeps_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(iterator: Any, *rest: Any) -> None:  # as torch's handler does where a process was killed
        raise RuntimeError("DataLoader worker is killed by signal")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_try_put_index", fail)
    for is_persistent in (False, True):
        loader = load(range(8), batch_size=2, num_workers=2, persistent_workers=is_persistent)
        with pytest.raises(RuntimeError, match="killed by signal") as error:
            list(prepare_data_loader(loader))
        assert error.value.__traceback__ is not None
        wait_until(lambda: not multiprocessing.active_children())


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_persistent_processes_go_on_after_an_error() -> None:
    loader = load(
        Failing(torch.arange(8)), batch_size=2, sampler=[0, 1, 4, 5], num_workers=2, persistent_workers=True
    )
    prepared = prepare_data_loader(loader)
    before = None
    for _ in range(2):
        with pytest.raises(ValueError, match="no sample 5"):
            list(prepared)
        pids = {child.pid for child in multiprocessing.active_children()}
        assert len(pids) == 2 and before in (None, pids)
        before = pids
    prepared._iterator._shutdown_workers()


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_worker_processes_and_pickling(alone: Runtime) -> None:
    loader: Any = prepare_data_loader(
        load(TensorDataset(torch.arange(9)), batch_size=2, num_workers=1), None, 2, 1, runtime=alone
    )
    expected = [[2, 3], [6, 7], [1, 2]]
    assert [batch[0].tolist() for batch in loader] == expected
    again = pickle.loads(pickle.dumps(loader))
    assert isinstance(again, DataLoaderShard)
    assert [batch[0].tolist() for batch in again] == expected


def test_batches_go_to_the_device() -> None:
    loader = load(TensorDataset(torch.arange(4), torch.arange(4)), batch_size=2)
    meta = torch.device("meta")
    for batch in prepare_data_loader(loader, meta, put_on_device=True):
        assert [tensor.device for tensor in batch] == [meta, meta]
    nested = load([{"a": {"b": [1]}, "c": "text"}] * 2, batch_size=2)
    (batch,) = prepare_data_loader(nested, meta, put_on_device=True, non_blocking=True)
    assert batch["a"]["b"][0].device == meta
    assert batch["c"] == ["text", "text"]
    for batch in prepare_data_loader(loader, meta):
        assert batch[0].device == CPU


def test_what_lies_on_the_device_stays_as_it_is() -> None:
    ready = {
        "pair": [torch.zeros(2), (torch.zeros(2), "text")],
        "deep": {"ids": torch.zeros(1), "none": None},
    }
    loader = load([ready], batch_size=None, collate_fn=lambda batch: batch)
    (batch,) = prepare_data_loader(loader, CPU, put_on_device=True)
    assert batch is ready
    (moved,) = prepare_data_loader(loader, torch.device("meta"), put_on_device=True)
    assert moved["pair"][1][0].device.type == moved["deep"]["ids"].device.type == "meta"
    assert moved["pair"][1][1] == "text" and moved["deep"]["none"] is None


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
@pytest.mark.parametrize("dispatch", [False, True])
def test_pinned_memory_is_asked_for_as_before(alone: Runtime, dispatch: bool) -> None:
    raw = load(range(5), batch_size=2, pin_memory=True, pin_memory_device="cuda")
    options = {"put_on_device": True, "dispatch_batches": dispatch, "non_blocking": True, "runtime": alone}
    loader: Any = prepare_data_loader(raw, CPU, **options)  # type: ignore[arg-type]
    for each in (loader, skip_first_batches(loader, 0), skip_first_batches(raw, 0)):
        assert each.pin_memory and each.pin_memory_device == "cuda"
    loader.pin_memory_device = ""  # torch would look for the device
    assert batches_of(loader) == [[0, 1], [2, 3], [4]]


def test_streams_of_whole_batches_are_not_cut_by_their_number() -> None:
    class Whole(SizedNumbers):
        def __iter__(self) -> Iterator[Any]:
            return (torch.tensor([k, k + 100]) for k in range(self.n))

    loaders = shares(load(Whole(3), batch_size=None), 2)
    assert gathered(loaders) == ([[0, 100, 1, 101], [2, 102, 0, 100]], [-1])


def test_loaders_without_automatic_batches() -> None:
    loader = load(range(5), batch_size=None, sampler=range(4, -1, -1))
    assert [list(each) for each in shares(loader, 2)] == [[4, 2, 0], [3, 1, 4]]
    assert list(prepare_data_loader(loader)) == [4, 3, 2, 1, 0]
    own = load(range(5), batch_size=None, sampler=BatchSampler(range(5), 2, False))
    rows = load(torch.arange(5), batch_size=None, sampler=own.sampler)
    assert [batches_of(each) for each in shares(rows, 2)] == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
    assert [list(each) for each in shares(load(Numbers(5), batch_size=None), 2)] == [
        [0, 2, 4],
        [1, 3, 0],
    ]


def test_custom_batch_samplers_and_samplers() -> None:
    lists = load(range(9), batch_sampler=[[0, 1], [2], [3, 4, 5], [6, 7, 8]])
    loaders = shares(lists, 2, even_batches=False)
    assert [batches_of(each) for each in loaders] == [[[0, 1], [3, 4, 5]], [[2], [6, 7, 8]]]
    assert loaders[0].remainder == -1
    with pytest.raises(ValueError, match="batch_size attribute"):
        _ = loaders[0].total_batch_size
    # the remainder counts what the sampler yields, not what the dataset holds
    subset = load(range(100), batch_size=2, sampler=SubsetRandomSampler(range(6)))
    loaders = shares(subset, 2)
    for each in loaders:
        each.set_sampler(SequentialSampler(range(6)))
    assert [number for step in gathered(loaders)[0] for number in step] == list(range(6))


def test_dropping_batch_sampler_leaves_nothing_to_cut() -> None:
    sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=True)
    loaders = shares(load(range(11), batch_sampler=sampler), 2)
    assert gathered(loaders) == ([[0, 1, 2, 3], [4, 5, 6, 7]], [-1])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["map", "sized"])
def test_skip_first_batches(world: int, kind: str) -> None:
    dataset: Any = SizedNumbers(13) if kind == "sized" else range(13)
    loaders = shares(load(dataset, batch_size=2), world)
    for count in (0, 1, 3, 99):
        skipped: list[Any] = [skip_first_batches(each, count) for each in loaders]
        expected = gathered(loaders)[0][count:]
        assert [len(each) for each in skipped] == [len(expected)] * world
        assert gathered(skipped)[0] == expected
        assert isinstance(skipped[0], DataLoaderShard)
    raw = load(dataset, batch_size=2)
    assert batches_of(skip_first_batches(raw, 4)) == batches_of(raw)[4:]


def test_skipping_keeps_epoch_and_order() -> None:
    loader: Any = shares(
        load(range(12), batch_size=2, shuffle=True),
        2,
        use_seedable_sampler=True,
        data_seed=0,
    )[1]
    first, second = batches_of(loader), batches_of(loader)
    loader.set_epoch(1)
    assert batches_of(skip_first_batches(loader, 1)) == second[1:]
    assert first != second


def test_arguments_are_checked() -> None:
    loader = load(range(8), batch_size=3)
    with pytest.raises(ValueError, match="3 % 2 = 1"):
        prepare_data_loader(loader, None, 2, 0, split_batches=True)
    with pytest.raises(ValueError, match="put_on_device=True"):
        prepare_data_loader(loader, dispatch_batches=True)
    with pytest.raises(ValueError, match=r"process_index 2 .* 0\.\.1"):
        prepare_data_loader(loader, None, 2, 2)
    with pytest.raises(ValueError, match="0 or more, not -1"):
        skip_first_batches(loader, -1)
    assert DataLoaderConfiguration().even_batches
    with pytest.raises(ValueError, match="skip_first_batches"):
        shares(loader, 1)[0].state_dict()


def test_ranks_of_one_model_replica_read_the_same() -> None:
    loader = load(range(8), batch_size=2)
    mesh = Mesh(dp_shard=2, tp=2)
    got = [
        batches_of(prepare_data_loader(loader, None, 4, rank, torch_device_mesh=mesh)) for rank in range(4)
    ]
    assert got[0] == got[1] == [[0, 1], [4, 5]]
    assert got[2] == got[3] == [[2, 3], [6, 7]]


def _shuffle_on_each_rank() -> list[Any]:
    torch.manual_seed(install_gloo())
    seen = []
    for seedable in (False, True):
        raw = load(range(12), batch_size=3, shuffle=True)
        loader = prepare_data_loader(raw, rng_types=["generator"], use_seedable_sampler=seedable)
        seen.append([batches_of(loader) for _ in range(2)])
    return seen


def test_ranks_that_were_seeded_differently_shuffle_alike() -> None:
    for first, second in zip(*run_ranks(_shuffle_on_each_rank), strict=True):
        epochs = [sorted(itertools.chain(*a, *b)) for a, b in zip(first, second, strict=True)]
        assert epochs == [list(range(12))] * 2
        assert first[0] != first[1]
