"""Start a data loader in the middle of its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .base import PreparedLoader
from .options import options_of, outer_sampler
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

    After `load_state`, in the epoch in which the checkpoint was saved, `num_batches` are batches of the run that saved
    it, also if it had another number of processes or another batch size. The rest of the epoch keeps its order: it is
    shared out to the processes of this run from the first sample on that no process has read.

    Args:
        dataloader: prepared or not.
        num_batches: how many to leave out; those that one process gets.

    Raises:
        ValueError: `num_batches` is negative. Or the checkpoint is of other processes and the loader cannot start
            where they stopped: it is stateful, its dataset shards itself or is read by worker processes, or no batch
            starts there.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches must be 0 or more, not {num_batches}")
    if isinstance(dataloader, PreparedLoader):
        return dataloader.after(num_batches)
    options = options_of(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        options |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        return SkipDataLoader(dataloader.dataset, num_batches, **options)
    rest = SkipBatchSampler(outer_sampler(dataloader), num_batches)
    chosen = (
        {"batch_sampler": rest}
        if dataloader.batch_sampler is not None
        else {"sampler": rest, "batch_size": None}
    )
    return DataLoader(dataloader.dataset, **options, **chosen)
