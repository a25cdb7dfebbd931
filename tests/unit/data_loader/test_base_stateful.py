"""Loaders with a state: the next batch after loading it is the one that was next when it was taken."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from notebook_accel import handlers
from notebook_accel import runtime as process
from notebook_accel.comm.single import SingleComm
from notebook_accel.comm.torch_dist import TorchComm, open_group
from notebook_accel.data_loader import (
    DataLoaderConfiguration,
    DataLoaderDispatcher,
    DataLoaderShard,
    prepare_data_loader,
    skip_first_batches,
)
from notebook_accel.runtime import Runtime
from notebook_accel.topology import Topology, from_environ
from tests.unit.multiprocess import run_ranks

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="states are those of torchdata")

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Numbers(IterableDataset[int]):
    """The numbers below n, each of the loader's worker processes giving its part."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(range(self.n) if info is None else range(info.id, self.n, info.num_workers))


class Counter(IterableDataset[int]):
    """The numbers below n, from an iterator that has a state and counts what was read."""

    def __init__(self, n: int) -> None:
        self.n, self.at, self.reads = n, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.n:
            self.at += 1
            self.reads += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Opaque:
    """A batch sampler of the user's own, with batches of varying size."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[list[int]]:
        return ([k] * (1 + k % 3) for k in range(self.n))

    def __len__(self) -> int:
        return self.n


class Recorded:
    """Map-style data that counts what is read of it."""

    def __init__(self, n: int) -> None:
        self.n, self.reads = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


def raw(kind: str, n: int = 23, workers: int = 0, **options: Any) -> Any:
    """Return torch's loader of the kind."""
    options |= {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    if kind == "iterable":
        return DataLoader(Numbers(n), batch_size=2, **options)
    if kind == "counter":
        return DataLoader(Counter(n), batch_size=2, **options)
    data: Any = list(range(n))
    if kind == "opaque":
        return DataLoader(data, batch_sampler=Opaque(n), **options)  # type: ignore[arg-type]
    if kind == "subset":
        return DataLoader(data, batch_size=2, sampler=SubsetRandomSampler(range(n)), **options)
    if kind == "generator":
        generator = torch.Generator().manual_seed(n)
        return DataLoader(data, batch_size=2, shuffle=True, generator=generator, **options)
    if kind == "single":
        return DataLoader(data, batch_size=None, shuffle=True, **options)
    if kind == "torchdata":
        return stateful.StatefulDataLoader(data, batch_size=2, shuffle=True, **options)
    return DataLoader(data, batch_size=2, shuffle=kind != "plain", **options)


def prepared(kind: str, world: int = 1, rank: int = 0, workers: int = 0, **options: Any) -> Any:
    """Return the stateful loader that `prepare_data_loader` makes of the kind."""
    options = {"even_batches": kind != "opaque", "use_seedable_sampler": kind == "seedable"} | options
    loader = raw(kind, workers=workers)
    return prepare_data_loader(loader, None, world, rank, use_stateful_dataloader=True, **options)


def numbers(batch: Any) -> Any:
    return torch.as_tensor(batch).tolist()


def as_lists(batches: Any) -> list[Any]:
    return [numbers(batch) for batch in batches]


KINDS = [
    "plain",
    "shuffled",
    "generator",
    "seedable",
    "subset",
    "opaque",
    "single",
    "torchdata",
    "iterable",
    "counter",
]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_with_the_next_batch(kind: str, world: int) -> None:
    for rank in range(world):
        torch.manual_seed(3)
        loader = prepared(kind, world, rank)
        assert isinstance(loader, stateful.StatefulDataLoader) and isinstance(loader, DataLoaderShard)
        as_lists(loader)  # an epoch before
        seen, states = [], []
        for batch in loader:
            seen.append(numbers(batch))
            states.append(copy.deepcopy(loader.state_dict()))
        third = as_lists(loader) if kind not in ("shuffled", "subset", "single") or world > 1 else None
        for number, state in enumerate(states):
            torch.manual_seed(99)
            again = prepared(kind, world, rank)
            again.load_state_dict(pickle.loads(pickle.dumps(state)))
            assert again.state_dict()["_iteration"] == state["_iteration"]
            if number + 1 < len(states):
                assert as_lists(again) == seen[number + 1 :], (kind, number)
                assert again.iteration == 2
            elif third is not None:
                assert as_lists(again) == third, kind


@pytest.mark.parametrize("kind", ["plain", "iterable", "generator"])
def test_a_loader_that_went_on_can_go_on_again(kind: str) -> None:
    expected = as_lists(prepared(kind))
    state: dict[str, Any] | None = None
    seen = []
    for _ in expected:
        loader = prepared(kind)
        if state is not None:
            loader.load_state_dict(state)
        seen.append(numbers(next(iter(loader))))
        state = loader.state_dict()
        loader._iterator = None
    assert seen == expected


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["generator", "iterable"])
def test_worker_processes_go_on_too(kind: str, persistent: bool) -> None:
    def made() -> Any:
        loader = raw(kind, workers=2, persistent_workers=persistent)
        return prepare_data_loader(loader, None, 2, 1, use_stateful_dataloader=True)

    loader = made()
    seen, states = [], []
    for batch in loader:
        seen.append(numbers(batch))
        states.append(pickle.dumps(loader.state_dict()))
    following = as_lists(loader)
    middle = len(seen) // 2
    for number, expected in ((middle, seen[middle + 1 :]), (len(seen) - 1, following)):
        again = made()
        again.load_state_dict(pickle.loads(states[number]))
        assert as_lists(again) == expected
        del again
    with pytest.raises(ValueError, match="num_workers=0"):
        prepared(kind, 2, 1).load_state_dict(pickle.loads(states[0]))


def test_what_was_read_is_not_read_again() -> None:
    data = Recorded(4000)
    made = lambda: prepare_data_loader(  # noqa: E731
        DataLoader(data, batch_size=2, shuffle=True),  # type: ignore[arg-type]
        use_stateful_dataloader=True,
        use_seedable_sampler=True,
        data_seed=1,
    )
    loader: Any = made()
    state = next(itertools.islice(((loader.state_dict(), batch)[0] for batch in loader), 1500, None))
    again: Any = made()
    again.load_state_dict(state)
    data.reads = 0
    assert len(list(again)) == 2000 - 1501
    assert data.reads == 4000 - 2 * 1501


def test_the_end_of_an_epoch_starts_the_next_one() -> None:
    loader = prepared("seedable", data_seed=5)
    first = [numbers(batch) for batch in loader]
    state = loader.state_dict()
    assert state["_iterator_finished"] and state["_iteration"] == 1
    second = as_lists(loader)
    again = prepared("seedable", data_seed=77)
    again.load_state_dict(state)
    assert as_lists(again) == second != first
    fresh = prepared("seedable", data_seed=6)
    fresh.load_state_dict(prepared("seedable", data_seed=5).state_dict())
    assert as_lists(fresh) == first


def test_an_epoch_is_chosen_after_a_break_at_the_last_batch() -> None:
    loader = prepared("seedable")
    for _ in loader:
        if loader.end_of_dataloader:
            break
    assert loader.state_dict()["_iteration"] == 1
    loader.set_epoch(5)
    assert loader.state_dict()["_iteration"] == 5


def test_flags_hold_after_going_on() -> None:
    loader = prepared("plain", 2, 0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    again = prepared("plain", 2, 0)
    again.load_state_dict(state)
    ends = [again.end_of_dataloader for _ in again]
    assert ends == [False] * (len(ends) - 1) + [True]
    assert again.remainder == 23 % 4


def test_skipping_keeps_the_state() -> None:
    for kind in ("generator", "iterable"):
        expected = as_lists(prepared(kind))
        skipping: Any = skip_first_batches(prepared(kind), 3)
        assert isinstance(skipping, stateful.StatefulDataLoader)
        iterator = iter(skipping)
        assert [numbers(next(iterator)) for _ in range(2)] == expected[3:5]
        state = skipping.state_dict()
        iterator.close()
        for again in (prepared(kind), skip_first_batches(prepared(kind), 3)):
            again.load_state_dict(state)
            assert as_lists(again) == expected[5:]


def test_global_random_state_is_left_alone() -> None:
    torch.manual_seed(0)
    loader = prepared("subset")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    again = prepared("subset")
    again.load_state_dict(state)
    torch.manual_seed(8)
    expected = torch.rand(3)
    torch.manual_seed(8)
    next(iter(again))  # draws no seed for worker processes: the process that began the epoch did
    assert torch.equal(torch.rand(3), expected)


def test_arguments_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = prepared("seedable")
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    iterator.close()
    other = prepared("plain")
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="make and prepare the loader as before"):
        next(iter(other))
    with pytest.raises(ValueError, match="num_workers=2"):
        prepared("plain", workers=2).load_state_dict(state)
    with pytest.raises(TypeError, match="by its name"):
        DataLoaderShard([1], None, None, None, 0, True)
    monkeypatch.setattr(handlers, "at_least", lambda *_: False)
    for make in (
        lambda: DataLoaderConfiguration(use_stateful_dataloader=True),
        lambda: prepared("plain"),
    ):
        with pytest.raises(ImportError, match=r"notebook-accel\[stateful\]"):
            make()


class OwnShard(DataLoaderShard):
    """A user's class of loaders."""


def test_a_class_of_the_user_can_be_stateful() -> None:
    loader: Any = OwnShard(list(range(12)), batch_size=2, use_stateful_dataloader=True)
    assert isinstance(loader, OwnShard) and isinstance(loader, stateful.StatefulDataLoader)
    iterator = iter(loader)
    next(iterator)
    again: Any = pickle.loads(pickle.dumps(OwnShard([1], use_stateful_dataloader=True)))
    assert type(again) is type(loader)
    again = OwnShard(list(range(12)), batch_size=2, use_stateful_dataloader=True)
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist() == next(iterator).tolist() == [2, 3]


def test_dispatcher_of_one_process() -> None:
    alone = Runtime(topology=Topology(), device=CPU, comm=SingleComm())
    options = {"device": CPU, "put_on_device": True, "runtime": alone, "use_stateful_dataloader": True}
    loader: Any = prepare_data_loader(raw("counter"), **options)
    assert isinstance(loader, DataLoaderDispatcher)
    assert type(pickle.loads(pickle.dumps(loader))) is type(loader)
    iterator = iter(loader)
    seen = [numbers(next(iterator)) for _ in range(3)]
    state = loader.state_dict()
    iterator.close()
    data = Counter(23)
    again: Any = prepare_data_loader(DataLoader(data, batch_size=2), **options)
    again.load_state_dict(state)
    rest = as_lists(again)
    assert [k for batch in seen + rest for k in batch] == list(range(23))
    assert data.reads == 23 - 6


def _resume_on_each_rank() -> list[Any]:
    # The ranks of these tests are daemons, which Python forbids to start the loader's worker processes.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    topology = from_environ()
    open_group(topology, "gloo", device=CPU)
    process.install(Runtime(topology=topology, device=CPU, comm=TorchComm(CPU)))
    checked = []
    for kind, dispatch, workers in (
        ("seedable", False, 0),
        ("generator", False, 0),
        ("shuffled", True, 0),
        ("counter", True, 0),
        ("iterable", True, 0),
        ("iterable", True, 2),
    ):
        torch.manual_seed(topology.rank)

        def made(kind: str = kind, dispatch: bool = dispatch, workers: int = workers) -> Any:
            return prepare_data_loader(
                raw(kind, 24, workers),
                CPU,
                put_on_device=True,
                dispatch_batches=dispatch,
                rng_types=["generator"],
                use_seedable_sampler=kind == "seedable",
                use_stateful_dataloader=True,
            )

        loader = made()
        seen, states = [], []
        for batch in loader:
            seen.append(numbers(batch))
            states.append(pickle.dumps(loader.state_dict()))
        middle = len(seen) // 2
        again = made()
        again.load_state_dict(pickle.loads(states[middle]))
        checked.append((kind, dispatch, seen[middle + 1 :], as_lists(again), again.end_of_dataloader))
    if topology.rank == 0:
        try:
            made().load_state_dict({"_receives": True, "_iteration": 0})
        except ValueError as error:
            checked.append(str(error))
    return checked


def test_two_ranks_go_on_together() -> None:
    first, second = run_ranks(_resume_on_each_rank)
    assert "the state of rank 0" in first.pop()
    for rank in (first, second):
        for kind, dispatch, expected, got, ended in rank:
            assert got == expected != [], (kind, dispatch)
            assert ended
