"""Start a data loader in the middle of its epoch."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from .base import PreparedLoader, outer_sampler
from .own import is_of_user, without_iterator
from .resume import Epoch
from .samplers import SkipBatchSampler, name_sampler, options_of, sampler_chain


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
        epoch = self.begin()
        yield from self._hand_out(epoch, lambda: self._read_rest(epoch))
        self.epoch_state.end(epoch)

    def _read_rest(self, epoch: Epoch) -> Iterator[Any]:
        for batch in islice(self._read_all(), self._batches_to_skip(), None):
            self._note_state(epoch)
            yield batch
        self._reach_end(epoch)


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
        TypeError: `num_batches` is no integer, or `dataloader` no loader.
        ValueError: `num_batches` is negative. Or the checkpoint is of other processes and the loader cannot start
            where they stopped: it is stateful, its dataset shards itself or is read by worker processes, or no batch
            starts there.
    """
    try:
        num_batches = operator.index(num_batches)
    except TypeError:
        raise TypeError(f"num_batches={num_batches!r}: an integer is needed") from None
    if num_batches < 0:
        raise ValueError(f"num_batches must be 0 or more, not {num_batches}")
    if not hasattr(dataloader, "dataset"):
        raise TypeError(
            f"skip_first_batches takes a DataLoader, prepared or not, not a {type(dataloader).__name__}"
        )
    if isinstance(dataloader, PreparedLoader):
        return _skip_prepared(dataloader, num_batches)
    options = options_of(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        options |= {"batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
        skipping = SkipDataLoader(dataloader.dataset, num_batches, **options)
        skipping.adopt(dataloader)
        return skipping
    if dataloader.batch_sampler is None:
        options["batch_size"] = None
    rest = SkipBatchSampler(outer_sampler(dataloader), num_batches)
    if is_of_user(dataloader):
        made: DataLoader[Any] = without_iterator(dataloader)
        made.__dict__.update(name_sampler(dataloader, rest))
        return made
    return DataLoader(dataloader.dataset, **options, **name_sampler(dataloader, rest))


def _skip_prepared(loader: PreparedLoader, num_batches: int) -> PreparedLoader:
    """Return a loader of the same epoch. When it reaches its end, both are in the next epoch."""
    parts = (loader, *sampler_chain(outer_sampler(loader)))
    skipped = num_batches + sum(getattr(part, "skip_batches", 0) for part in parts)
    epoch_state, epoch, first = loader.epoch_state.after(loader.iteration, skipped, loader.round_size)
    made: PreparedLoader = object.__new__(type(loader))
    # Not by assignment: torch forbids that for samplers of a loader that is made.
    made.__dict__.update(loader.__getstate__(), **loader.renew(), epoch_state=epoch_state, iteration=epoch)
    made.__dict__.update(loader.skip(num_batches) if first is None else _start_at(loader, first))
    return made


def _start_at(loader: PreparedLoader, first: int) -> dict[str, Any]:
    """Return the attributes of a loader that starts at this sample of the epoch."""
    number, odd = divmod(first, loader.own_batch_size)
    if odd:
        size = loader.own_batch_size
        raise ValueError(
            f"the checkpoint was saved after {first} samples of the epoch, where no batch of {size} starts "
            f"({first} % {size} = {odd}): prepare the loader with a batch_size that divides {first}"
        )
    return {"first_sample": first, **loader.start_at_batch(number)}
