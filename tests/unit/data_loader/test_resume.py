"""Tests for runs that go on in the middle of an epoch: every number is that of the undisturbed run."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.utils import set_seed
from tests.unit.multiprocess import run_ranks

BATCHES = 8  # of every process


class Noisy(TensorDataset):
    """Samples with noise of the process that reads them: an augmentation."""

    def __getitem__(self, index: Any) -> Any:
        (sample,) = super().__getitem__(index)
        return (sample + torch.rand(()),)


class Shuffled(IterableDataset[Any]):
    """An iterable dataset with an order for each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        return iter([(torch.tensor([index / self.size]),) for index in order.tolist()])


class Run:
    """A model with dropout and its loader, and what it saw: the samples and the loss of each batch."""

    def __init__(
        self,
        num_workers: int = 0,
        weighted: bool = False,
        noisy: bool = False,
        iterable: bool = False,
        **config: Any,
    ) -> None:
        self.accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
        set_seed(3, device_specific=True)
        model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        size = self.accelerator.num_processes * BATCHES * 2
        parts = 1 if config.get("split_batches") else self.accelerator.num_processes
        order: dict[str, Any] = {"shuffle": True}
        if weighted:
            order = {"sampler": WeightedRandomSampler(torch.ones(size).tolist(), size)}
        dataset: Any = (Noisy if noisy else TensorDataset)(torch.linspace(0, 1, size).reshape(-1, 1))
        if iterable:
            dataset, order = Shuffled(size), {}
        self.parts: Any = self.accelerator.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(dataset, batch_size=size // BATCHES // parts, num_workers=num_workers, **order),
        )
        self.loader: Any = self.parts[2]
        self.seen: list[Any] = []

    def epoch(self, loader: Any = None) -> Iterator[None]:
        model, optimizer = self.parts[:2]
        for (batch,) in self.loader if loader is None else loader:
            loss = model(batch).square().mean()
            self.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.seen.append((batch.flatten().tolist(), loss.item()))
            yield

    def finish(self, *epochs: Iterator[None]) -> list[Any]:
        for _ in itertools.chain(*epochs):
            pass
        return self.seen


def rank_resumes(where: Path, options: dict[str, Any]) -> None:
    first = Run(**options)
    first.finish(first.epoch())
    first.seen.clear()
    epoch = first.epoch()
    for saved in (3, 5):
        for _ in range(saved - len(first.seen)):
            next(epoch)
        first.accelerator.save_state(where / f"at{saved}")
    wanted = first.finish(epoch, first.epoch())
    assert len(wanted) == 2 * BATCHES
    half = list(wanted)

    second = Run(**options)
    torch.manual_seed(99)
    second.accelerator.load_state(where / "at3")
    stateful = options.get("use_stateful_dataloader", False)
    rest = second.loader if stateful else second.accelerator.skip_first_batches(second.loader, 3)
    epoch = second.epoch(rest)
    next(epoch)
    next(epoch)
    second.accelerator.save_state(where / "again5")
    assert second.finish(epoch, second.epoch()) == half[3:]

    third = Run(**options)
    third.accelerator.load_state(where / "again5")
    rest = third.loader if stateful else third.accelerator.skip_first_batches(third.loader, 5)
    assert third.finish(third.epoch(rest), third.epoch()) == half[5:]


OPTIONS = [
    {},
    {"weighted": True},
    {"noisy": True},
    {"use_seedable_sampler": True, "data_seed": 5},
    {"dispatch_batches": True},
    {"split_batches": True},
    {"num_workers": 2},
    {"iterable": True},
    {"iterable": True, "dispatch_batches": True},
    {"use_stateful_dataloader": True},
    {"use_stateful_dataloader": True, "num_workers": 2},
    {"use_stateful_dataloader": True, "dispatch_batches": True},
]


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_sees_what_the_undisturbed_one_saw(
    tmp_path: Path, clean_runtime: None, options: dict[str, Any], world_size: int
) -> None:
    if world_size == 1:
        rank_resumes(tmp_path, options)
    else:
        has_loaders = "num_workers" in options
        run_ranks(rank_resumes, tmp_path, options, world_size=world_size, starts_others=has_loaders)


def test_an_epoch_left_early_is_not_gone_on_with(tmp_path: Path, clean_runtime: None) -> None:
    """Loops that break after so many batches start a new epoch after loading, as they do without."""
    first = Run()
    epoch = first.epoch()
    next(epoch)
    epoch.close()
    first.accelerator.save_state(tmp_path / "kept")
    wanted = first.finish(first.epoch(), first.epoch())[1:]
    second = Run()
    second.accelerator.load_state(tmp_path / "kept")
    assert second.finish(second.epoch(), second.epoch()) == wanted


def test_the_interrupted_order_is_of_that_epoch_alone(tmp_path: Path, clean_runtime: None) -> None:
    first = Run()
    epoch = first.epoch()
    next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    second = Run()
    second.accelerator.load_state(tmp_path / "kept")
    second.finish(second.epoch())
    second.seen.clear()
    skipping = second.accelerator.skip_first_batches(second.loader, 1)
    assert [batch for batch, _ in second.finish(second.epoch(skipping))] != [
        batch for batch, _ in first.finish(epoch)[1:]
    ]


def rank_has_others(where: Path) -> None:
    run = Run(use_stateful_dataloader=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="was saved by 1 processes, not by 2"):
            run.accelerator.load_state(where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.accelerator.load_state(where)
    assert len(run.finish(run.epoch())) == BATCHES


def test_stateful_loaders_of_other_processes_start_a_new_epoch(tmp_path: Path, clean_runtime: None) -> None:
    run = Run(use_stateful_dataloader=True)
    next(run.epoch())
    where = run.accelerator.save_state(tmp_path / "kept")
    run_ranks(rank_has_others, where, world_size=2)


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path, clean_runtime: None) -> None:
    run = Run(use_stateful_dataloader=True)
    next(run.epoch())
    where = run.accelerator.save_state(tmp_path / "kept")
    other = Run(use_stateful_dataloader=True, num_workers=2)
    before = {name: value.clone() for name, value in other.parts[0].state_dict().items()}
    torch.nn.init.zeros_(other.parts[0][0].weight)
    before["0.weight"].zero_()
    with pytest.raises(ValueError, match="num_workers=2"):
        other.accelerator.load_state(where)
    assert all(torch.equal(value, before[name]) for name, value in other.parts[0].state_dict().items())
    assert len(other.finish(other.epoch())) == BATCHES


STYLES = ["all", "none", "next", "by hand"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_seedable_sampler": True, "data_seed": 5}, {"dispatch_batches": True}, {"iterable": True}],
)
def test_a_checkpoint_with_the_last_batch(
    tmp_path: Path, clean_runtime: None, options: dict[str, Any], style: str
) -> None:
    """The epoch is over, whether all its batches are skipped or none of the next one."""
    first = Run(**options)
    first.finish(first.epoch())
    epoch = first.epoch()
    for _ in range(BATCHES):
        next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    first.seen.clear()
    wanted = first.finish(epoch, first.epoch(), first.epoch())
    assert len(wanted) == 2 * BATCHES

    again = Run(**options)
    again.accelerator.load_state(tmp_path / "kept")
    again.accelerator.save_state(tmp_path / "again")
    for name in ("kept", "again"):
        second = Run(**options)
        torch.manual_seed(99)
        second.accelerator.load_state(tmp_path / name)
        loader = second.loader
        if style == "all":
            second.finish(second.epoch(second.accelerator.skip_first_batches(loader, BATCHES)))
            rest = loader
        elif style == "by hand":
            loader.set_epoch(2)
            rest = second.accelerator.skip_first_batches(loader, 0)
        else:
            rest = second.accelerator.skip_first_batches(loader, 0) if style == "next" else loader
        assert second.finish(second.epoch(rest), second.epoch()) == wanted


def test_a_stateful_loader_knows_that_its_epoch_is_over(tmp_path: Path, clean_runtime: None) -> None:
    first = Run(use_stateful_dataloader=True, iterable=True)
    epoch = first.epoch()
    for _ in range(BATCHES):
        next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    first.seen.clear()
    wanted = first.finish(epoch, first.epoch())
    second = Run(use_stateful_dataloader=True, iterable=True)
    second.accelerator.load_state(tmp_path / "kept")
    assert second.finish(second.epoch()) == wanted


def test_a_resumed_run_may_save_before_it_goes_on(tmp_path: Path, clean_runtime: None) -> None:
    first = Run()
    epoch = first.epoch()
    for _ in range(3):
        next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    wanted = first.finish(epoch, first.epoch())[3:]
    second = Run()
    second.accelerator.load_state(tmp_path / "kept")
    second.accelerator.save_state(tmp_path / "again")
    third = Run()
    third.accelerator.load_state(tmp_path / "again")
    skipping = third.accelerator.skip_first_batches(third.loader, 1)
    skipping = third.accelerator.skip_first_batches(skipping, 2)
    assert third.finish(third.epoch(skipping), third.epoch()) == wanted


def test_an_epoch_chosen_by_hand_is_not_the_interrupted_one(tmp_path: Path, clean_runtime: None) -> None:
    options = {"use_seedable_sampler": True, "data_seed": 5}
    first = Run(**options)
    epoch = first.epoch()
    next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    wanted = [batch for batch, _ in first.finish(epoch, first.epoch())][BATCHES + 1 :]
    second = Run(**options)
    second.accelerator.load_state(tmp_path / "kept")
    second.loader.set_epoch(1)
    skipping = second.accelerator.skip_first_batches(second.loader, 1)
    assert [batch for batch, _ in second.finish(second.epoch(skipping))] == wanted


@pytest.mark.parametrize("second", ["left", "kept", "to its end"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighted": True},
        {"use_seedable_sampler": True, "data_seed": 5},
        {"dispatch_batches": True},
        {"use_stateful_dataloader": True},
    ],
    ids=str,
)
def test_a_second_iterator_leaves_the_first_where_it_stands(
    tmp_path: Path, clean_runtime: None, options: dict[str, Any], second: str
) -> None:
    """A loop looks at its own loader, for a sample to log or to measure all of it, and saves in the same batch."""
    first = Run(**options)
    epoch = first.epoch()
    for _ in range(3):
        next(epoch)
    other = iter(first.loader)
    next(other)
    if second == "kept":  # the loop has the turn again
        next(epoch)
    elif second == "left":
        other.close()
    else:
        list(other)
    first.accelerator.save_state(tmp_path / "kept")
    number = len(first.seen)
    wanted = first.finish(epoch)[number:]

    run = Run(**options)
    run.accelerator.load_state(tmp_path / "kept")
    stateful = "use_stateful_dataloader" in options
    rest = run.loader if stateful else run.accelerator.skip_first_batches(run.loader, number)
    assert run.finish(run.epoch(rest)) == wanted


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_kept_iterator_counts_until_it_is_closed(clean_runtime: None, is_closed: bool) -> None:
    loader = Run(use_stateful_dataloader=True).loader
    kept = iter(loader)
    next(kept)
    if is_closed:
        kept.close()
    list(loader)
    assert loader.state_dict()["_iterator_finished"] == is_closed
    assert loader.state_dict()["_iteration"] == int(is_closed)


def test_a_second_iterator_over_the_rest_of_an_epoch(tmp_path: Path, clean_runtime: None) -> None:
    first = Run()
    epoch = first.epoch()
    for _ in range(3):
        next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    wanted = [batch for batch, _ in first.finish(epoch)[5:]]
    second = Run()
    second.accelerator.load_state(tmp_path / "kept")
    rest = second.accelerator.skip_first_batches(second.loader, 3)
    epoch = second.epoch(rest)
    next(epoch)
    next(iter(second.loader))
    next(epoch)
    second.accelerator.save_state(tmp_path / "again")
    third = Run()
    third.accelerator.load_state(tmp_path / "again")
    rest = third.accelerator.skip_first_batches(third.loader, 5)
    assert [batch for batch, _ in third.finish(third.epoch(rest))] == wanted


def test_a_rollback_stands_where_the_checkpoint_does(tmp_path: Path, clean_runtime: None) -> None:
    first = Run()
    epoch = first.epoch()
    next(epoch)
    first.accelerator.save_state(tmp_path / "kept")
    wanted = [batch for batch, _ in first.finish(epoch)[1:]]
    epoch = first.epoch()  # goes wrong after a batch
    next(epoch)
    first.accelerator.load_state(tmp_path / "kept")
    first.accelerator.save_state(tmp_path / "again")
    second = Run()
    second.accelerator.load_state(tmp_path / "again")
    rest = second.accelerator.skip_first_batches(second.loader, 1)
    assert [batch for batch, _ in second.finish(second.epoch(rest))] == wanted
