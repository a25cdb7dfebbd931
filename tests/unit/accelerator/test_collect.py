"""Metrics of nested objects, and of loaders that are read in turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from notebook_accel import Accelerator
from tests.unit.multiprocess import run_ranks


def load(accelerator: Accelerator, size: int, batch_size: int, start: int = 0) -> Any:
    return accelerator.prepare(DataLoader(torch.arange(start, start + size), batch_size=batch_size))  # type: ignore[arg-type]


def collect_nested(samples: int) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    seen: dict[str, list[Any]] = {"texts": [], "labels": [], "tensors": [], "in tuple": [], "sums": []}
    for batch in load(accelerator, samples, 4):
        texts = [f"t{number}" for number in batch.tolist()]
        labels = [f"l{number}" for number in batch.tolist()]
        first, second = accelerator.gather_for_metrics((texts, labels), use_gather_object=True)
        numbers, inner, total = accelerator.gather_for_metrics((batch, (labels, [texts][0]), batch.sum()))
        by_name = accelerator.gather_for_metrics({"texts": texts, "numbers": batch})
        assert accelerator.gather_for_metrics([batch, tuple(texts)])[1] == first
        assert accelerator.gather_for_metrics(list(zip(texts, labels, strict=True))) == list(
            zip(first, second, strict=True)
        )
        assert accelerator.gather_for_metrics(tuple(texts)) in (first, tuple(first)), "an object per sample"
        assert inner == (second, first) and by_name["texts"] == first
        assert by_name["numbers"].tolist() == numbers.tolist()
        seen["texts"] += first
        seen["labels"] += second
        seen["tensors"] += numbers.tolist()
        seen["sums"].append(total.ndim)
    return seen


@pytest.mark.parametrize("world", [1, 2])
def test_each_list_of_a_tuple_is_gathered(world: int, clean_runtime: None) -> None:
    for samples in (13, 16, 3):
        for seen in [collect_nested(samples)] if world == 1 else run_ranks(collect_nested, samples):
            assert seen["tensors"] == list(range(samples))
            assert seen["texts"] == [f"t{number}" for number in range(samples)]
            assert seen["labels"] == [f"l{number}" for number in range(samples)]
            assert set(seen["sums"]) == {world - 1}


def test_lists_that_may_be_samples_or_not(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    for _ in load(accelerator, 6, 3):
        boxes = ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
        with pytest.raises(
            TypeError, match="a tuple of 3 lists of 4 items, and a batch has 3 samples: make a list"
        ):
            accelerator.gather_for_metrics(boxes)
        tokens = ([1], [2, 3], [4])
        assert accelerator.gather_for_metrics(tokens) == tokens


def ranks_zip(*kinds: tuple[int, int]) -> list[Any]:
    accelerator = Accelerator(cpu=True)
    seen: list[Any] = [([], []) for _ in kinds]
    for batches in zip(*(load(accelerator, *kind) for kind in kinds), strict=False):
        for (tensors, texts), batch in zip(seen, batches, strict=True):
            tensors += accelerator.gather_for_metrics(batch).tolist()
            texts += accelerator.gather_for_metrics([str(number) for number in batch.tolist()])
    return seen


@pytest.mark.parametrize(
    "kinds",
    [((14, 2), (21, 3)), ((21, 3), (14, 2)), ((40, 4), (5, 3)), ((13, 2), (13, 2)), ((3, 1), (7, 2), (9, 3))],
)
def test_loaders_of_a_zip_have_their_own_remainders(kinds: Any) -> None:
    rounds = min(-(-size // (2 * batch_size)) for size, batch_size in kinds)
    wanted = [list(range(min(size, 2 * batch_size * rounds))) for size, batch_size in kinds]
    for seen in run_ranks(ranks_zip, *kinds):
        assert seen == [(numbers, [str(number) for number in numbers]) for numbers in wanted]


def ranks_zip_alike() -> tuple[list[int], list[int]]:
    accelerator = Accelerator(cpu=True)
    first, second = load(accelerator, 24, 2), load(accelerator, 10, 2)
    seen: tuple[list[int], list[int]] = ([], [])
    with pytest.warns(UserWarning, match="2 loaders are read in turn, their batches have 2 samples each"):
        for batches in zip(first, second, strict=False):
            for found, batch in zip(seen, batches, strict=True):
                found += accelerator.gather_for_metrics(batch).tolist()
    return seen


def test_batches_of_a_zip_that_are_alike_are_told_of() -> None:
    for first, second in run_ranks(ranks_zip_alike):
        assert first == list(range(12)), "nothing is lost"
        assert second == [*range(10), 0, 1]


def ranks_evaluate_inside() -> list[int]:
    accelerator = Accelerator(cpu=True)
    seen: list[int] = []
    other = load(accelerator, 7, 2)
    for batch in load(accelerator, 10, 2):
        for inner in other:
            seen += accelerator.gather_for_metrics(inner).tolist()
        seen += accelerator.gather_for_metrics(batch + 100).tolist()
    return seen


def test_nested_loops_have_their_own_remainders() -> None:
    wanted = [[*range(7), *range(100 + start, min(104 + start, 110))] for start in (0, 4, 8)]
    assert run_ranks(ranks_evaluate_inside) == [[number for part in wanted for number in part]] * 2
