"""Start a data loader in the middle of its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .base import PreparedLoader, options_of, outer_sampler
from .dispatch import DataLoaderDispatcher
from .samplers import SkipBatchSampler


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
        yield from self._hand_out(lambda: islice(self._read_all(), self.skip_batches, None))
        self.end()


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a loader like the given one, whose iterations start after its first batches.

    Batches of an iterable dataset are read and dropped; others are not read.

    Args:
        dataloader: prepared or not.
        num_batches: how many to leave out.

    Raises:
        ValueError: `num_batches` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches must be 0 or more, not {num_batches}")
    in_reading = isinstance(dataloader.dataset, IterableDataset)
    if isinstance(dataloader, PreparedLoader):
        return dataloader.after(num_batches if in_reading else 0, _sampler_after(dataloader, num_batches))
    options = options_of(dataloader) | _sampler_after(dataloader, num_batches)
    if in_reading:
        options |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        return SkipDataLoader(dataloader.dataset, num_batches, **options)
    if dataloader.batch_sampler is None:
        options["batch_size"] = None
    return DataLoader(dataloader.dataset, **options)


def _sampler_after(dataloader: DataLoader[Any], num_batches: int) -> dict[str, Any]:
    """Return the sampler that leaves out what makes up the batches, by its name in `DataLoader`."""
    if isinstance(dataloader.dataset, IterableDataset):
        return {}
    if isinstance(dataloader, DataLoaderDispatcher) and not dataloader.split_batches:
        num_batches *= dataloader.num_processes
    name = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
    return {name: SkipBatchSampler(outer_sampler(dataloader), num_batches)}
