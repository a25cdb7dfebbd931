"""DataLoaderDispatcher: rank 0 reads, every process receives its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.datapipe import IterDataPipe

from ..nested import (
    concatenate,
    ignorant_find_batch_size,
    recursively_apply,
    slice_tensors,
)
from ..runtime import Runtime
from ..state import PartialState
from .base import PreparedLoader, on_device
from .exchange import Exchange, Round
from .rows import complete_rows, count_samples, join_rows, mark_rows, slice_rows, take_rows
from .samplers import share_of

CPU: Final = torch.device("cpu")
_END: Final = object()


class DataLoaderDispatcher(PreparedLoader):
    """A data loader that only rank 0 reads; the others get their part of each global batch from it.

    A global batch is one batch of the loader with `split_batches`, else as many as there are processes. Samples
    of an incomplete last one are shared out evenly and completed from the first, unless `_drop_last`. Shared out are
    tensors, and lists that have an item for each sample; see `mark_rows`.

    Args:
        dataset: as `DataLoader` takes it.
        split_batches: see above.
        skip_batches: global batches to leave out at the start of every iteration.
        use_stateful_dataloader: True makes it a loader of torchdata, with `state_dict` and `load_state_dict`.
        slice_fn: called as `slice_fn(batch, slice, process_index=, num_processes=)` in place of `slice_tensors`.
        torch_device_mesh: ranks that differ only in its `tp` and `cp` dimensions get the same samples.
        iteration: the epoch to start with.
        kwargs: all that `DataLoader` takes.

    Raises:
        ValueError: there is no runtime, or the mesh has not one share for each of its processes.
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
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
        self.split_batches = split_batches
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self.torch_device_mesh = torch_device_mesh
        topology = self._place().topology
        self._first_batch = 0
        self._has_drawn = False  # whether this rank has followed rank 0 when that made worker processes
        self._num_shares, self._share = share_of(topology.world_size, topology.rank, torch_device_mesh)

    def skip(self, num_batches: int) -> dict[str, Any]:
        if isinstance(self.dataset, IterableDataset) or self.split_batches:
            return super().skip(num_batches)
        return super().skip(num_batches * self.num_processes)

    def start_at_batch(self, number: int) -> dict[str, Any]:
        if isinstance(self.dataset, IterableDataset):
            return {"_first_batch": number}
        return super().start_at_batch(number)

    @property
    def round_size(self) -> int | str:
        return self._round_size() or (1 if self.split_batches else self.num_processes)

    def _place(self) -> Runtime:
        return self.runtime or PartialState()._runtime  # it has to know its process

    @property
    def num_processes(self) -> int:
        """Number of processes, or groups of them that get the same samples, that share a global batch."""
        return self._num_shares

    @property
    def _reads(self) -> bool:
        return self._place().topology.rank == 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._track(self._batches)

    def _batches(self) -> Iterator[Any]:
        runtime, epoch = self._place(), self.epoch_state.newest
        reads = self._reads
        note_state = self._note_state if self.use_stateful_dataloader and not reads else None
        own = self._read() if reads else self._stand_by()
        send, feed = self.sender_to(runtime.device), runtime.feed
        exchange = Exchange(runtime.comm, self._parts())
        is_last = False
        while not is_last:
            sent, failure = _next_round(own) if reads else (None, None)
            received = exchange(sent)
            if failure is not None:
                raise failure
            if isinstance(received, str):
                raise RuntimeError(f"rank 0 could not read the next batch: {received}")
            if received is None:
                return
            batch = self._part_of(received)
            if note_state is not None:
                note_state(epoch)
            self.num_unique = self._count_unique(received)
            if is_last := received.is_last:
                self._reach_end(epoch)
                self.remainder = -1 if received.num_samples is None else received.num_samples
            yield send(batch)
            if feed is not None:
                feed.mark()

    def _parts(self) -> list[int]:
        """Return the part of a global batch that each rank gets, by rank."""
        world_size = self._place().topology.world_size
        return [share_of(world_size, rank, self.torch_device_mesh)[1] for rank in range(world_size)]

    def _samples_of_part(self, num_samples: int) -> int:
        rounded = 0 if self._drop_last else self.num_processes - 1
        return (num_samples + rounded) // self.num_processes

    def _count_unique(self, received: Round) -> int | None:
        num_samples = received.num_samples
        is_even = num_samples is None or num_samples % self.num_processes == 0
        return None if is_even or self._drop_last else num_samples

    def _part_of(self, received: Round) -> Any:
        part, num_parts = self._share, self._num_shares
        if num_parts == 1 or received.num_samples is None:
            return received.batch
        share = self._samples_of_part(received.num_samples)
        chosen = slice(part * share, (part + 1) * share)
        if self._shares_rows:
            return take_rows(received.batch, chosen, of_tensors=not received.is_part)
        return self.slice_fn(received.batch, chosen, process_index=part, num_processes=num_parts)

    def _read(self) -> Iterator[Round]:
        """Yield the rounds on rank 0; one is read ahead, so that the last one is known."""
        note_state = self._note_state if self.use_stateful_dataloader else None
        skipped, epoch = self._batches_to_skip(), self.epoch_state.newest
        batches = self._global_batches(islice(self._read_all(), self._first_batch, None))
        batch = next(batches, _END)
        filler = None if batch is _END else self._filler(batch)
        for _ in range(skipped):
            batch = next(batches, _END)
        while batch is not _END:
            if note_state is not None:
                note_state(epoch)
            following = next(batches, _END)
            yield self._round(batch, filler, is_last=following is _END)
            batch = following

    def _global_batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self.num_processes > 1:
            batches = map(self._mark, batches)
        if self.split_batches or self.num_processes == 1:
            yield from batches
            return
        while group := list(islice(batches, self.num_processes)):
            if len(group) < self.num_processes and self._drop_last:
                return
            try:
                yield self._join(group)
            except (RuntimeError, TypeError) as error:
                raise RuntimeError(
                    f"the batches for {len(group)} processes cannot be joined into one to dispatch ({error}): "
                    "use split_batches=True, or dispatch_batches=False"
                ) from error

    def _round(self, batch: Any, filler: Any, is_last: bool) -> Round:
        if self.num_processes == 1:
            num_samples = ignorant_find_batch_size(batch)
            return Round(batch=on_device(batch, CPU), num_samples=num_samples, is_last=is_last)
        num_samples = count_samples(batch)
        return Round(
            batch=on_device(self._complete(batch, num_samples, filler), CPU),
            num_samples=num_samples,
            is_last=is_last,
            share=self._samples_of_part(num_samples) if self._shares_rows else None,
        )

    @property
    def _shares_rows(self) -> bool:
        """Whether this class takes the parts out of a batch, not a function of the user."""
        return self.slice_fn is slice_tensors

    def _mark(self, batch: Any) -> Any:
        try:
            if self._shares_rows:
                return mark_rows(batch)
            count_samples(batch)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the batch cannot be shared out to {self.num_processes} processes ({error}): let the collate_fn make "
                "tensors whose first dimension counts the samples, and lists with an item for each, give prepare a "
                "slice_fn_for_dispatch, or use dispatch_batches=False"
            ) from error
        return batch

    def _join(self, batches: Sequence[Any]) -> Any:
        return join_rows(batches) if self._shares_rows else concatenate(batches, dim=0)

    def _filler(self, first: Any) -> Any:
        """Return a copy of the first samples, one for each process, to complete the last batch with."""
        num_parts = self.num_processes
        if num_parts == 1 or self._drop_last:
            return None
        chosen = slice(0, num_parts)
        if self._shares_rows:
            few = slice_rows(first, chosen)
        else:
            few = self.slice_fn(first, chosen, process_index=0, num_processes=num_parts)
        return recursively_apply(torch.clone, few)

    def _complete(self, batch: Any, num_samples: int, filler: Any) -> Any:
        missing = -num_samples % self.num_processes
        if missing == 0 or self._drop_last:
            return batch
        repeats = -(-missing // count_samples(filler))
        try:
            if self._shares_rows:
                return complete_rows(batch, filler, repeats)
            return concatenate([batch, *[filler] * repeats], dim=0)
        except (RuntimeError, TypeError) as error:
            raise RuntimeError(
                f"the {num_samples} samples of a batch for {self.num_processes} processes cannot be completed with "
                f"samples of the first one ({error}): let the collate_fn make batches alike, or use "
                "dispatch_batches=False"
            ) from error

    def _stand_by(self) -> Iterator[Round]:
        """Draw what rank 0 draws, on a rank that does not read: the generators stay alike."""
        if self.num_workers == 0 or isinstance(self.dataset, IterDataPipe):
            self._read_all()  # also for a datapipe with worker processes: torch agrees on its seed by a collective
            self.epoch_state.newest.reader = None  # worker processes end with their iterator
            if not self.persistent_workers:
                self._iterator = None
        elif not (self.epoch_state.goes_on or (self.persistent_workers and self._has_drawn)):
            # as torch does for the seeds of worker processes, when it makes them
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._has_drawn = True
        return iter(())

    def _round_size(self) -> int | None:
        size: int | None = getattr(self.batch_sampler, "batch_size", None)
        return size if size is None or self.split_batches else size * self.num_processes

    def _count_batches(self) -> int:
        batches = super()._count_batches()
        if self.split_batches:
            return batches
        whole, extra = divmod(batches, self.num_processes)
        return whole + (extra > 0 and not self._drop_last)


def _next_round(rounds: Iterator[Round]) -> tuple[Round | str | None, Exception | None]:
    """Return the next round and no error, or why there is none and the error to raise once the others know.

    None in place of both is the end.
    """
    try:
        return next(rounds, None), None
    except Exception as error:
        return f"{type(error).__name__}: {error}", error
