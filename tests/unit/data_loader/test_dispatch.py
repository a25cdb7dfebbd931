"""Loaders that only rank 0 reads: every rank gets its part, or hears why there is none."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data.datapipes.datapipe import IterDataPipe

from notebook_accel import Accelerator
from notebook_accel.comm.single import SingleComm
from notebook_accel.data_loader import DataLoaderDispatcher, prepare_data_loader, skip_first_batches
from notebook_accel.handlers import DataLoaderConfiguration
from notebook_accel.runtime import Runtime
from notebook_accel.topology import Topology
from tests.unit.clock import wait_until
from tests.unit.data_loader.test_data_loader import CPU, Mesh, Numbers, batches_of, install_gloo, load
from tests.unit.multiprocess import run_ranks


class Given(Numbers):
    """The items given, which may be anything."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def test_dispatcher_of_one_process() -> None:
    alone = Runtime(topology=Topology(), device=CPU, comm=SingleComm())
    loader: Any = prepare_data_loader(load(Numbers(5), batch_size=2), CPU, put_on_device=True, runtime=alone)
    assert isinstance(loader, DataLoaderDispatcher)
    assert batches_of(loader) == [[0, 1], [2, 3], [4]]
    assert (loader.remainder, loader.iteration) == (1, 1)
    assert batches_of(skip_first_batches(loader, 1)) == [[2, 3], [4]]


@pytest.mark.parametrize("size", [None, 2])
def test_one_process_gets_any_batch_as_it_is(size: int | None) -> None:
    alone = Runtime(topology=Topology(), device=CPU, comm=SingleComm())
    items = ({"text": "a", "x": None}, 7, torch.tensor(1.5), None, "b")
    raw = load(Given(*items), batch_size=size, collate_fn=lambda batch: batch)
    loader: Any = prepare_data_loader(raw, CPU, put_on_device=True, runtime=alone)
    assert isinstance(loader, DataLoaderDispatcher)
    expected = list(items) if size is None else [list(items[:2]), list(items[2:4]), ["b"]]
    seen = [(batch, loader.end_of_dataloader) for batch in loader]
    assert [batch for batch, _ in seen] == expected
    assert [end for _, end in seen] == [False] * (len(expected) - 1) + [True]
    assert loader.remainder == -1


class Failing(Numbers):
    def __iter__(self) -> Iterator[int]:
        yield from range(4)
        raise OSError("no such disk")


def _dispatch_on_each_rank() -> list[Any]:
    rank = install_gloo()
    seen: list[Any] = []
    for n, size, split, drop in itertools.product((0, 1, 3, 8, 9), (1, 2), (False, True), (False, True)):
        if split and size == 1 and drop:
            continue
        raw = load(Numbers(n), batch_size=size, drop_last=drop)
        loader: Any = prepare_data_loader(raw, CPU, split_batches=split, put_on_device=True)
        steps = [(batch.tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader]
        steps += [batch.tolist() for batch in skip_first_batches(loader, 1)]
        seen.append(((n, size, split, drop), steps))
    pairs = load([{"x": float(i), "y": [i]} for i in range(6)], batch_size=2)
    nested: Any = prepare_data_loader(pairs, CPU, put_on_device=True, dispatch_batches=True)
    seen.append([batch["y"][0].tolist() for batch in nested])
    seen.append((len(nested), nested.total_batch_size))
    failing = prepare_data_loader(load(Failing(9), batch_size=1), CPU, put_on_device=True)
    try:
        list(failing)
    except (OSError, RuntimeError) as error:
        seen.append(f"{type(error).__name__}: {error}" if rank else repr(error))
    return seen


def test_dispatcher_sends_every_rank_its_part() -> None:
    results = run_ranks(_dispatch_on_each_rank)
    cases = [dict(rank[:-3]) for rank in results]
    for case, steps in cases[0].items():
        n, size, split, drop = case
        others = cases[1][case]
        assert len(steps) == len(others)
        both = [(a, b) for a, b in zip(steps, others, strict=True) if isinstance(a, tuple)]
        joined = [a[0] + b[0] for a, b in both]
        if both:
            assert both[-1][0][1] and not any(a[1] for a, _ in both[:-1])
            if not drop:
                joined[-1] = joined[-1][: both[-1][0][2]]
        span = size if split else size * 2
        whole = n - n % span if drop else n
        if not (split and size == 1):
            assert [number for step in joined for number in step] == list(range(whole)), case
        assert all(len(a[0]) == len(b[0]) for a, b in both)
        assert steps[len(both) :] == [a[0] for a, _ in both][1:]
    assert [rank[-3] for rank in results] == [[[0, 1], [4]], [[2, 3], [5]]]
    assert [rank[-2] for rank in results] == [(2, 4), (2, 4)]
    assert results[0][-1] == "OSError('no such disk')"
    assert results[1][-1] == "RuntimeError: rank 0 could not read the next batch: OSError: no such disk"


def _dispatch_under_a_mesh() -> list[Any]:
    install_gloo()
    seen: list[Any] = []
    for mesh in (Mesh(tp=2), Mesh(dp_shard=2, tp=1), Mesh(dp=2)):
        loader: Any = prepare_data_loader(
            load(range(5), batch_size=2),
            CPU,
            put_on_device=True,
            dispatch_batches=True,
            torch_device_mesh=mesh,
        )
        skipping: Any = skip_first_batches(loader, 1)
        seen.append((batches_of(loader), len(loader), loader.remainder, len(skipping)))
    return seen


def test_dispatch_gives_ranks_of_one_replica_the_same() -> None:
    first, second = run_ranks(_dispatch_under_a_mesh)
    assert first[0] == second[0] == ([[0, 1], [2, 3], [4]], 3, 1, 2)
    for own, other in (first[1:2] + second[1:2], first[2:] + second[2:]):
        assert own == ([[0, 1], [4]], 2, 1, 1)
        assert other == ([[2, 3], [0]], 2, 1, 1)


def _write_to_batches() -> list[list[int]]:
    install_gloo()
    seen = []
    for batch in prepare_data_loader(load(Given(*range(7, 12)), batch_size=2), CPU, put_on_device=True):
        seen.append(batch.tolist())
        batch.zero_()
    return seen


def test_last_batches_are_completed_by_samples_as_they_were_read() -> None:
    assert run_ranks(_write_to_batches) == [[[7, 8], [11]], [[9, 10], [7]]]


def _dispatch_what_cannot_be() -> list[str]:
    install_gloo()
    heard = []
    cases: list[tuple[Any, int | None]] = [((1, 2), None), ((1,), None), (("a",) * 4, 2)]
    for odd in (
        torch.ones(3),
        torch.tensor(1),
        torch.eye(4).to_sparse(),
        torch.ones(4).numpy(),
        [torch.ones(3).numpy()],
    ):
        cases.append(([[torch.arange(4), odd]], 1))
    for one, other in (("x1", "x0"), ([], ["a", "b"]), (["a", "b"], []), (["a", "b"], "a"), ({"a": 1}, {})):
        cases.append(([{"x": torch.ones(2), "name": name} for name in (one, other)], None))
    whole = {"x": torch.ones(4), "name": list("abcd")}
    cases.append(([[whole | {"name": "abcd"}], [{"x": torch.ones(3), "name": list("abc")}]], 1))
    cases.append(([[whole], [{"x": torch.ones(3, 2), "name": list("abc")}]], 1))
    for items, size in cases:
        collate = (lambda batch: batch[0]) if size == 1 else (lambda batch: batch)
        raw = load(Given(*items), batch_size=size, collate_fn=collate)
        loader = prepare_data_loader(raw, CPU, put_on_device=True, split_batches=size is not None)
        try:
            list(loader)
        except (RuntimeError, TypeError) as error:
            heard.append(str(error))
    return heard


def test_every_rank_hears_why_a_batch_cannot_be_shared_out() -> None:
    first, second = run_ranks(_dispatch_what_cannot_be)
    assert "not in int" in first[0] and "not in int" in first[1] and "not in str" in first[2]
    assert "shape [3] in a batch of 4" in first[3] and "shape [] in a batch of 4" in first[4]
    assert "layout torch.sparse_coo" in first[5]
    assert "ndarray is no tensor" in first[6] and "ndarray is no tensor" in first[7]
    assert "'x1' belongs to one batch, 'x0' to another" in first[8]
    assert "a list of 0 items beside a Rows" in first[9] and "a Rows beside a list of 0 items" in first[10]
    assert (
        "in one batch, and not in another" in first[11] and "a dict of ['a'] beside a dict of []" in first[12]
    )
    assert len(first) == 15 and all("samples of the first one" in text for text in first[13:])
    assert all("dispatch_batches=False" in text and "processes" in text for text in first)
    assert all(told.endswith(own) for told, own in zip(second, first, strict=True))


TEXTS = [{"x": i, "text": f"text {i}", "words": tuple(f"{word}{i}" for word in "abcde")} for i in range(7)]


def _dispatch_texts() -> list[list[Any]]:
    install_gloo()
    seen = []
    for split in (False, True):
        raw = load(Given(*TEXTS), batch_size=4 if split else 2, collate_fn=_collate)
        loader: Any = prepare_data_loader(raw, CPU, put_on_device=True, split_batches=split)
        seen.append(list(loader))
    return seen


def _collate(samples: list[Any]) -> dict[str, Any]:
    return {
        "texts": [item["text"] for item in samples],
        **default_collate(samples),
        "note": "of all",
        "none": [],
    }


def test_lists_with_an_item_for_each_sample_are_shared_out() -> None:
    for split, loaded in enumerate(zip(*run_ranks(_dispatch_texts), strict=True)):
        for rank, batches in enumerate(loaded):
            wanted = [[0, 1], [4, 5]] if rank == 0 else [[2, 3], [6, 0]]
            assert [batch["x"].tolist() for batch in batches] == wanted, split
            for batch in batches:
                numbers = batch["x"].tolist()
                assert batch["texts"] == batch["text"] == [f"text {i}" for i in numbers]
                assert batch["words"] == [tuple(f"{word}{i}" for i in numbers) for word in "abcde"]
                assert batch["note"] == "of all" and batch["none"] == []


WHOLE: list[dict[str, Any]] = [
    {
        "x": torch.arange(4),
        "size": (224, 200),
        "cols": ["a", "b"],
        "id": "b0",
        "refs": [["a"], *[["b", "c"]] * 3],
    },
    {
        "x": torch.arange(2),
        "size": (224, 200),
        "cols": ["a", "b", "c"],
        "id": "b1",
        "refs": [["a", "d"], ["b", "c"]],
    },
    {
        "x": torch.arange(3),
        "size": [5, 6, 7],
        "cols": ["d"],
        "id": None,
        "refs": list("abc"),
        "more": float("nan"),
    },
]


def _dispatch_whole_values() -> list[Any]:
    install_gloo()
    options: dict[str, Any] = {"put_on_device": True, "dispatch_batches": True}

    def split(*batches: Any) -> Any:
        raw = load(Given(*batches), batch_size=1, collate_fn=lambda batch: batch[0])
        return prepare_data_loader(raw, CPU, split_batches=True, **options)

    seen = list(split(*WHOLE))
    alike = [{"x": torch.arange(2), "nan": [float("nan")], "sizes": [(2, 3), (4, 5)]} for _ in range(2)]
    (joined,) = prepare_data_loader(load(Given(*alike), batch_size=None), CPU, **options)
    nested_texts = {
        "x": torch.arange(2),
        "words": [[("a0", "a1"), ("b0", "b1")], [("c0", "c1"), ("d0", "d1")]],
    }
    return [seen, str(joined["nan"]), joined["sizes"], next(iter(split(nested_texts)))["words"]]


def test_what_has_no_item_for_each_sample_belongs_to_the_whole_batch() -> None:
    for rank, (seen, nan, sizes, words) in enumerate(run_ranks(_dispatch_whole_values)):
        for batch, whole in zip(seen, WHOLE, strict=True):
            count = -(-len(whole["x"]) // 2)
            assert len(batch["x"]) == count and {"x", "refs"} | batch.keys() == whole.keys()
            for key in batch.keys() - {"x", "refs", "more"}:
                assert batch[key] == whole[key], key
            completed = [*whole["refs"], ["a"]]
            assert batch["refs"] == completed[rank * count : (rank + 1) * count]
        assert nan == "[nan]" and sizes == [[2, 3], [4, 5]]
        assert words == [[(f"{word}{rank}",) for word in pair] for pair in ("ab", "cd")]


class Streamed(IterDataPipe[int]):
    """Numbers of a datapipe."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def _count_processes() -> list[int]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    rank = install_gloo()
    found = []
    for stateful in (False, True):
        raw = DataLoader(Streamed(), batch_size=2, num_workers=1, multiprocessing_context="fork")
        loader: Any = prepare_data_loader(raw, CPU, put_on_device=True, use_stateful_dataloader=stateful)
        batches = iter(loader)
        next(batches)
        wait_until(lambda: len(multiprocessing.active_children()) <= (rank == 0))  # some are on their way out
        found.append(len(multiprocessing.active_children()))
        list(batches)
        del batches, loader
    return [rank, *found]


def test_ranks_that_only_receive_keep_no_processes_of_loaders() -> None:
    assert run_ranks(_count_processes) == [[0, 1, 1], [1, 0, 0]]


def _draw_after_epochs() -> list[list[int]]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    install_gloo()
    found = []
    for persistent in (False, True):
        torch.manual_seed(0)
        raw = load(range(8), batch_size=2, num_workers=1, persistent_workers=persistent)
        loader: Any = prepare_data_loader(raw, CPU, put_on_device=True, dispatch_batches=True)
        for _ in range(3):
            list(loader)
        found.append(int(torch.randint(1 << 30, ())))
        del loader
    return [found]


def test_random_states_of_ranks_that_only_receive_stay_alike() -> None:
    first, second = run_ranks(_draw_after_epochs)
    assert first == second and first[0][0] != first[0][1]


def _gather_short_batches() -> list[list[int]]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    batches = [
        torch.arange(start, stop) for start, stop in ((0, 4), (4, 5), (5, 9), (9, 13), (13, 15), (15, 16))
    ]
    loader = accelerator.prepare(load(Given(*batches), batch_size=None))
    return [accelerator.gather_for_metrics(batch).tolist() for batch in loader]


def test_samples_that_complete_a_short_batch_before_the_last_are_not_counted() -> None:
    wanted = [list(range(5)), list(range(5, 13)), list(range(13, 16))]
    assert run_ranks(_gather_short_batches) == [wanted, wanted]


def test_no_state_is_needed_before(clean_runtime: None) -> None:
    loader = DataLoaderDispatcher(list(range(8)), batch_size=4)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
