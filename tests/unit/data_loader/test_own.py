"""Loaders of the user's own class keep their iteration, attributes and methods when they are prepared."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from notebook_accel import Accelerator, DataLoaderConfiguration
from notebook_accel.data_loader import prepare_data_loader, skip_first_batches
from tests.unit.multiprocess import run_ranks


class Scaled(DataLoader[Any]):
    """Its batches change on their way, which it reads in a thread, as MONAI's ThreadDataLoader does."""

    tag = "own"
    device = "of the user"

    def __init__(self, *args: Any, factor: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        assert self.device == "of the user"
        batches: Queue[Any] = Queue(2)
        reader = super().__iter__()

        def read() -> None:
            for batch in reader:
                batches.put(batch)
            batches.put(None)

        thread = threading.Thread(target=read)
        thread.start()
        while (batch := batches.get()) is not None:
            yield batch * self.factor
        thread.join()

    def describe(self) -> str:
        return f"factor {self.factor}"


class Named(DataLoader[Any]):
    """It iterates as torch does."""

    name = "train"


class Endless(DataLoader[Any]):
    """It keeps one iterator for all epochs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for _ in range(len(self)):
            yield next(self.iterator)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def ranks_read() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name in ("map", "stream", "dispatched"):
        config = DataLoaderConfiguration(dispatch_batches=name == "dispatched")
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data: Any = Stream() if name in ("stream", "dispatched") else list(range(11))
        loader: Any = accelerator.prepare(Scaled(data, batch_size=2, factor=3))
        epochs = []
        for part in (loader, accelerator.skip_first_batches(loader, 1), loader):
            found, ends = [], []
            for batch in part:
                found += accelerator.gather_for_metrics(batch).tolist()
                ends.append(accelerator.gradient_state.end_of_dataloader)
            assert ends == [False] * (len(ends) - 1) + [True]
            epochs.append(found)
        seen[name] = [*epochs, loader.describe(), loader.tag, loader.factor]
    return seen


def test_a_subclass_reads_its_share_in_its_own_way() -> None:
    first, second = run_ranks(ranks_read)
    assert first == second
    whole = [3 * number for number in range(11)]
    for found in first.values():
        assert found == [whole, whole[4:], whole, "factor 3", "own", 3]


def test_batches_of_a_sampler_with_a_state_are_read() -> None:
    class WithState(BatchSampler):
        def load_state_dict(self, state: Any) -> None: ...

    batches = WithState(SequentialSampler(range(4)), 2, False)
    loader = prepare_data_loader(Scaled(range(4), batch_sampler=batches, factor=2))
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


def test_attributes_are_those_of_the_user() -> None:
    loader: Any = prepare_data_loader(Named([1, 2, 3], batch_size=2))
    assert loader.name == "train" and [len(batch) for batch in loader] == [2, 1]
    with pytest.raises(AttributeError, match="'Named' object has no attribute 'missing'"):
        _ = loader.missing
    raw = Scaled([1, 2, 3], batch_size=2, factor=3)
    scaled: Any = prepare_data_loader(raw, num_processes=2, process_index=1)
    scaled.factor = 5
    for each in (scaled, copy.copy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert torch.cat(list(each)).tolist() == [15, 5] and each.describe() == "factor 5"
    assert raw.factor == 3 and torch.cat(list(raw)).tolist() == [3, 6, 9], "the user's loader stays as it was"
    assert torch.cat(list(skip_first_batches(raw, 1))).tolist() == [9]


@pytest.mark.may_leak("signals", reason="torch's loader processes leave a SIGCHLD handler")
def test_worker_processes_go_on_with_the_next_epoch() -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "batch_size": 2, "factor": 2}
    loader: Any = prepare_data_loader(Scaled(list(range(4)), **options))
    assert torch.cat(list(loader)).tolist() == [0, 2, 4, 6]
    (process,) = loader.own._iterator._workers
    assert torch.cat(list(loader)).tolist() == [0, 2, 4, 6] and loader.own._iterator._workers == [process]
    next(iter(loader))
    assert torch.cat(list(loader)).tolist() == [0, 2, 4, 6]
    del loader
    process.join(10)
    assert not process.is_alive()


def test_a_loader_that_does_not_read_its_share_is_refused() -> None:
    loader = prepare_data_loader(Endless(list(range(8)), batch_size=2), num_processes=2, process_index=0)
    with pytest.raises(RuntimeError, match="Endless gave a batch without reading its batch_sampler"):
        list(loader)
