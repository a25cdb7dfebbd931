"""DataLoaderShard: the loader of a process that reads its own share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset

from ..runtime import Runtime
from ..seeding import synchronize_rng_states
from .base import PreparedLoader
from .iterable import IterableDatasetShard
from .resume import Epoch, ResumableSampler

_END: Final = object()


class DataLoaderShard(PreparedLoader):
    """A data loader that knows the last batch when it hands it out, and moves batches to the device.

    Batches of an iterable dataset are read one ahead for this, as are those of a loader with a state, and those of a
    loader whose class iterates in its own way.

    What it reads is chosen by the batch sampler or dataset it is given: `prepare_data_loader` shards those.

    Args:
        dataset: as `DataLoader` takes it.
        device: where batches are moved; None leaves them.
        rng_types: generators that every epoch starts with as rank 0 has them.
        synchronized_generator: the one that `generator` in `rng_types` means.
        skip_batches: batches to leave out at the start of every iteration.
        use_stateful_dataloader: True makes it a loader of torchdata, with `state_dict` and `load_state_dict`.
        torch_device_mesh: taken for compatibility; `prepare_data_loader` applies it.
        iteration: the epoch to start with.
        kwargs: all that `DataLoader` takes.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Sequence[str] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        runtime: Runtime | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            drop_last_round=_drop_last,
            non_blocking=_non_blocking,
            iteration=iteration,
            runtime=runtime,
            **kwargs,
        )
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator

    def start_at_batch(self, number: int) -> dict[str, Any]:
        if not isinstance(self.dataset, IterableDataset):
            return super().start_at_batch(number)
        if not isinstance(self.dataset, IterableDatasetShard):
            return self.skip(number)
        shard = copy.copy(self.dataset)
        shard.skip_samples = number * self.own_batch_size
        return {"dataset": shard}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._track(self._batches)

    def _batches(self) -> Iterator[Any]:
        send, mark, epoch = self._sender(), self._marker(), self.epoch_state.newest
        note_state = self._note_state if self.use_stateful_dataloader else None
        skipped = self._batches_to_skip()
        if self.rng_types and self.runtime is not None and not self.epoch_state.goes_on:
            synchronize_rng_states(self.rng_types, self.synchronized_generator, runtime=self.runtime)
        iterator = self._read_all()
        for _ in range(skipped):
            if next(iterator, _END) is _END:
                return
        is_drawn = isinstance(self._index_sampler, ResumableSampler) and not self.own_iteration
        if is_drawn and note_state is None:
            yield from self._drawn_batches(iterator, skipped)
            return
        batch = next(iterator, _END)
        while batch is not _END:
            if send is not None:
                batch = send(batch)
            if note_state is not None:
                note_state(epoch)
            following = next(iterator, _END)
            if following is _END:
                self._reach_end(epoch)
            yield batch
            if mark is not None:
                mark()
            batch = following

    def _drawn_batches(self, iterator: Iterator[Any], skipped: int) -> Iterator[Any]:
        """Iterate batches that a sampler chooses, of which it is known which is the last."""
        send, mark, epoch = self._sender(), self._marker(), self.epoch_state.newest
        if mark is not None and send is not None and self.num_workers > 0:
            # loader processes read ahead: the next batch is sent while this one is used
            iterator, send = _one_ahead(map(send, iterator)), None
        for number, batch in enumerate(iterator, skipped + 1):
            if send is not None:
                batch = send(batch)
            if number == epoch.total:
                self._reach_end(epoch)
            yield batch
            if mark is not None:
                mark()

    def _sender(self) -> Callable[[Any], Any] | None:
        """Return what puts the batches of this epoch on the device, None where they stay."""
        return None if self.device is None else self.sender_to(self.device)

    def _marker(self) -> Callable[[], None] | None:
        """Return what to call after a batch was used, None for nothing."""
        feed = None if self.runtime is None else self.runtime.feed
        return None if feed is None else feed.mark

    def _reach_end(self, epoch: Epoch) -> None:
        super()._reach_end(epoch)
        shard = self.dataset
        if self._drop_last or not isinstance(shard, IterableDatasetShard) or shard.batch_size is None:
            return  # without a batch size, a sample may be a batch of unknown size
        if self.remainder == -1:
            # Counted while reading; unknown with loader processes, which read copies of the dataset.
            self.remainder = shard.remainder


def _one_ahead(items: Iterator[Any]) -> Iterator[Any]:
    item = next(items, _END)
    while item is not _END:
        following = next(items, _END)
        yield item
        item = following
