"""Start a data loader in the middle of its epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .base import PreparedLoader, options_of, outer_sampler
from .dispatch import DataLoaderDispatcher
from .samplers import batches_from
from .shard import DataLoaderShard


class SkipBatchSampler(BatchSampler):
    """The batches of another batch sampler after its first `skip_batches`."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any], skip_batches: int = 0) -> None:
        self.batch_sampler: Any = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.num_processes: int = getattr(batch_sampler, "num_processes", 1)
        self.split_batches: bool = getattr(batch_sampler, "split_batches", False)

    @property
    def sampler(self) -> Any:
        """The sampler under the batch sampler; AttributeError where it has none."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """Number of batches without skipping."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        return batches_from(self.batch_sampler, self.skip_batches)

    def iterate_from(self, start: int) -> Iterator[Any]:
        """Iterate without the first `start` of the batches that are left."""
        return batches_from(self.batch_sampler, self.skip_batches + start)


class SkipDataLoader(PreparedLoader):
    """A data loader that reads its first `skip_batches` batches and leaves them out.

    `skip_first_batches` is better where there is a batch sampler: what is skipped is not read then.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(
            dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.begin()
        yield from islice(self._read_all(), self.skip_batches, None)
        self.end()

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like the given one, prepared or not, whose iterations start after `num_batches` batches.

    Batches that a batch sampler chooses are not read, and where torch's own sampler chooses them not walked through
    either; those of an iterable dataset are read and dropped.

    Raises:
        ValueError: `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches must be 0 or more, not {num_batches}")
    skipped = num_batches
    if isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches:
        skipped *= dataloader.num_processes
    options = options_of(dataloader)
    in_reading = isinstance(dataloader.dataset, IterableDataset)
    if in_reading:
        options |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    elif dataloader.batch_sampler is None:
        options |= {"sampler": SkipBatchSampler(outer_sampler(dataloader), skipped), "batch_size": None}
    else:
        options |= {"batch_sampler": SkipBatchSampler(outer_sampler(dataloader), skipped)}
    if not isinstance(dataloader, PreparedLoader):
        if in_reading:
            return SkipDataLoader(dataloader.dataset, num_batches, **options)
        return DataLoader(dataloader.dataset, **options)
    options["skip_batches"] = dataloader.skip_batches + (num_batches if in_reading else 0)
    return _remade(dataloader, options)


def _remade(dataloader: PreparedLoader, options: dict[str, Any]) -> DataLoader[Any]:
    if isinstance(dataloader, (DataLoaderShard, DataLoaderDispatcher)):
        options |= {
            "_drop_last": dataloader._drop_last,
            "_non_blocking": dataloader._non_blocking,
            "iteration": dataloader.iteration,
        }
    if hasattr(dataloader, "snapshot_every_n_steps"):
        options["snapshot_every_n_steps"] = dataloader.snapshot_every_n_steps
    options["runtime"] = dataloader.runtime
    options["use_stateful_dataloader"] = dataloader.use_stateful_dataloader
    if isinstance(dataloader, DataLoaderShard):
        return DataLoaderShard(
            dataloader.dataset,
            device=dataloader.device,
            rng_types=dataloader.rng_types,
            synchronized_generator=dataloader.synchronized_generator,
            **options,
        )
    if isinstance(dataloader, DataLoaderDispatcher):
        return DataLoaderDispatcher(
            dataloader.dataset,
            split_batches=dataloader.split_batches,
            slice_fn=dataloader.slice_fn,
            torch_device_mesh=dataloader.torch_device_mesh,
            **options,
        )
    return SkipDataLoader(dataloader.dataset, **options)
