"""Accumulation counts the batches of the loop that the code is in, whatever became of other iterators."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel.accelerator import Accelerator
from notebook_accel.data_loader import DataLoaderConfiguration
from notebook_accel.data_loader.skip import SkipDataLoader
from tests.unit.multiprocess import run_ranks


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


EVERY_4TH_AND_LAST = [False, False, False, True, False, True]


@pytest.fixture(params=[False, True], ids=["shard", "dispatch"])
def accelerator(request: pytest.FixtureRequest, clean_runtime: None) -> Accelerator:
    loading = DataLoaderConfiguration(dispatch_batches=request.param)
    return Accelerator(cpu=True, gradient_accumulation_steps=4, dataloader_config=loading)


def load(accelerator: Accelerator, batches: int) -> Any:
    return accelerator.prepare(DataLoader(list(range(batches))))  # type: ignore[arg-type]


def synced(accelerator: Accelerator, batches: Any) -> Iterator[bool]:
    """Yield for each batch whether its block is a step."""
    for _ in batches:
        with accelerator.accumulate():
            yield accelerator.sync_gradients


def take(loader: Any, count: int) -> None:
    """Leave a loop over the loader after `count` batches."""
    for _ in itertools.islice(loader, count):
        pass


def leave_by_an_error(loader: Any) -> None:
    try:
        for _ in loader:
            raise OSError
    except OSError:
        pass


def nest(loader: Any) -> None:
    for _ in loader:
        take(loader, 1)


LEAVE: dict[str, Callable[[Any], Any]] = {
    "after the first batch": lambda loader: take(loader, 1),
    "after the last batch": lambda loader: take(loader, 3),
    "by an error": leave_by_an_error,
    "read to its end": list,
    "nested in itself": nest,
}


@pytest.mark.parametrize("leave", LEAVE.values(), ids=LEAVE.keys())
@pytest.mark.parametrize("own", [False, True], ids=["another loader", "the same loader"])
def test_a_loop_within_the_loop(accelerator: Accelerator, leave: Callable[[Any], Any], own: bool) -> None:
    loader, other = load(accelerator, 6), load(accelerator, 3)
    seen = []
    for _ in loader:
        leave(loader if own else other)
        with accelerator.accumulate():
            seen.append(accelerator.sync_gradients)
    assert seen == EVERY_4TH_AND_LAST
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("position", [1, 3], ids=["not at its end", "at its end"])
def test_an_iterator_that_is_kept(accelerator: Accelerator, position: int) -> None:
    loader, other = load(accelerator, 6), load(accelerator, 3)
    kept = []
    seen = []
    for number, is_step in enumerate(synced(accelerator, loader)):
        seen.append(is_step)
        if number == 0:
            kept = [iter(other), iter(loader)]
            for _ in range(position):
                next(kept[0])
            next(kept[1])
    assert seen == EVERY_4TH_AND_LAST
    assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("begun", [0, 1], ids=["within", "before"])
def test_an_iterator_that_is_advanced_by_hand(accelerator: Accelerator, begun: int) -> None:
    loader, other = load(accelerator, 6), load(accelerator, 20)
    kept = iter(other)
    take(kept, begun)
    for _ in range(2):
        seen = []
        for _ in loader:
            next(kept)
            with accelerator.accumulate():
                seen.append(accelerator.sync_gradients)
        assert seen == EVERY_4TH_AND_LAST


@pytest.mark.parametrize("lengths", [(6, 6), (6, 9), (9, 6)])
def test_two_loaders_zipped(accelerator: Accelerator, lengths: tuple[int, int]) -> None:
    pair = [load(accelerator, length) for length in lengths]
    for _ in range(2):
        assert list(synced(accelerator, zip(*pair, strict=False))) == EVERY_4TH_AND_LAST


def test_a_loop_within_the_last_batch_of_another(accelerator: Accelerator) -> None:
    loader, other = load(accelerator, 1), load(accelerator, 6)
    for _ in loader:
        assert list(synced(accelerator, other)) == EVERY_4TH_AND_LAST


def test_an_older_iterator_is_closed_late(accelerator: Accelerator) -> None:
    loader = load(accelerator, 6)
    kept: list[Any] = [iter(loader)]
    next(kept[0])
    seen = []
    for number, is_step in enumerate(synced(accelerator, loader)):
        seen.append(is_step)
        if number == 2:
            kept.clear()
    assert seen == EVERY_4TH_AND_LAST


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_a_look_at_the_loader_within_its_own_loop(clean_runtime: None) -> None:
    """Its loader process has read ahead: that the end is near was known before."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader: Any = accelerator.prepare(DataLoader(list(range(6)), num_workers=1, prefetch_factor=6))  # type: ignore[arg-type]
    seen = []
    for is_step in synced(accelerator, loader):
        if not seen:
            take(loader, 1)
        seen.append(is_step)
    assert seen == EVERY_4TH_AND_LAST


def test_a_loader_that_skips_within_the_loop(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    loader = load(accelerator, 6)
    seen = []
    for is_step in synced(accelerator, loader):
        take(SkipDataLoader(Numbers(), 1), 2)
        seen.append(is_step)
    assert seen == EVERY_4TH_AND_LAST


def test_metrics_of_a_loop_that_was_left(accelerator: Accelerator) -> None:
    loader = load(accelerator, 6)
    other: Any = accelerator.prepare(DataLoader(list(range(3)), batch_size=2))  # type: ignore[arg-type]
    for _ in loader:
        for batch in other:
            if len(batch) == 1:
                break
        assert accelerator.gather_for_metrics([1, 2]) == [1], "of the last batch of `other`"
    assert accelerator.gather_for_metrics([1, 2]) == [1, 2]


def test_a_loss_that_is_divided_already_stays(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = torch.ones(1, requires_grad=True)
    accelerator.backward(8 * weight.sum())
    accelerator.backward(8 * weight.sum(), scale_wrt_gas=False)
    assert weight.grad is not None and weight.grad.item() == 2 + 8


def train_in_turn(
    accelerator: Accelerator, loader: Any, models: list[Any], optimizers: list[Any]
) -> Iterator[Any]:
    """Train the first model with every batch, the second with every second one; yield their weights."""
    for number, x in enumerate(loader):
        for model, optimizer in list(zip(models, optimizers, strict=True))[: 1 + number % 2]:
            with accelerator.accumulate(model):
                with accelerator.accumulate(
                    *models
                ):  # a set of its own, which changes nothing for the one around it
                    pass
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        yield [accelerator.unwrap_model(model).weight.item() for model in models]


def models_in_turn(folder: str) -> tuple[list[Any], list[str]]:
    """Train, and go on from a checkpoint where the second model has had one of its two batches."""
    seen = []
    for is_resumed in (False, True):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        models = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for model in models:
            torch.nn.init.zeros_(model.weight)
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        data: Any = torch.arange(20.0)[:, None]
        *parts, loader = accelerator.prepare(*models, *optimizers, DataLoader(data))
        if is_resumed:
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader, 6)
        for number, weights in enumerate(train_in_turn(accelerator, loader, parts[:2], parts[2:])):
            seen.append(weights)
            if number == 5 and not is_resumed:
                with warnings.catch_warnings(record=True) as caught:
                    accelerator.save_state(folder)
                break
    return seen, [str(warning.message)[:47] for warning in caught]


def test_each_set_of_models_counts_its_own_batches(tmp_path: Path) -> None:
    """Ten batches on each of two ranks, the second model has those with odd numbers."""
    means = [2 * number + 0.5 for number in range(10)]  # of both ranks' batches
    steps = {1: means[:2], 3: means[2:4], 5: means[4:6], 7: means[6:8], 9: means[8:]}
    # the gradient of batch 5 is not in the checkpoint
    other_steps = {3: [means[1], means[3]], 7: [means[7]], 9: [means[9]]}
    expected, first, second = [], 0.0, 0.0
    for number in range(10):
        first -= sum(steps.get(number, ())) / 2
        second -= sum(other_steps.get(number, ())) / 2
        expected.append([first, second])
    (seen, warned), (seen_by_other, _) = run_ranks(models_in_turn, str(tmp_path / "saved"))
    assert seen == seen_by_other == [pytest.approx(pair) for pair in expected]
    assert warned == ["save_state in the middle of an accumulation: th"]
