"""Samplers: which samples a process gets, in which order, and how an epoch goes on after its first batches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from ..devices import find_default
from .indices import Indices, RandomIndices, SequentialIndices

_SAME_SAMPLES: Final = ("tp", "cp")
_OWN_SAMPLES: Final = ("dp_replicate", "dp_shard", "dp", "fsdp")

_OPTIONS: Final = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def options_of(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that made the loader, except those that choose samples and batches."""
    return {name: getattr(dataloader, name) for name in _OPTIONS if hasattr(dataloader, name)}


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order depends on a seed and on the epoch alone.

    Each iteration seeds the generator with `initial_seed + epoch`, and its end moves on to the next epoch.
    `data_seed` is the initial seed, by default that of torch's global generator.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def seed_epoch(self) -> None:
        """Seed the generator for the current epoch."""
        if self.generator is None:
            self.generator = torch.Generator(device=find_default())
        self.generator.manual_seed(self.epoch + self.initial_seed)

    def __iter__(self) -> Iterator[int]:
        self.seed_epoch()
        yield from super().__iter__()
        self.end_epoch()

    def end_epoch(self) -> None:
        """Move on to the next epoch."""
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch


class _Over(BatchSampler):
    """What samplers over another batch sampler have in common."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any]) -> None:
        self.batch_sampler: Any = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)

    @property
    def sampler(self) -> Any:
        """The sampler under the batch sampler; AttributeError where it has none."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """Number of batches of the whole batch sampler."""
        return len(self.batch_sampler)


class _Setting:
    """A setting that several samplers have together."""

    def __init__(self, value: bool) -> None:
        self.value = value


class BatchSamplerShard(_Over):
    """The share of a batch sampler's batches that process `process_index` of `num_processes` gets.

    Of the batches `[[0, 1, 2, 3], [4, 5, 6, 7]]` the first of two processes gets `[[0, 1, 2, 3]]`, or with
    `split_batches` `[[0, 1], [4, 5]]`. `even_batches` completes the last round from the first indices, so that
    all processes get as many batches of one size; without it the last ones may be short or missing. Where the
    batch sampler drops an incomplete batch, an incomplete round is dropped too.

    Batches of varying size, from a batch sampler without `batch_size`, are handed out whole. There the last round is
    completed by whole batches, and `num_new` processes have one that is no repeat, None where all have.

    For torch's `BatchSampler` over a sequential or random sampler each process computes its own share; other
    samplers are iterated, and what belongs to others is skipped.

    Raises:
        ValueError: `split_batches` with a batch size that is unknown or no multiple of `num_processes`.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Iterable[Any],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        super().__init__(batch_sampler)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.num_new: int | None = None
        self._even_batches = _Setting(even_batches)
        if split_batches:
            check_split(self.batch_size, num_processes)

    @property
    def even_batches(self) -> bool:
        """Whether the last round is completed; those that `start_at` makes of a shard have this in common with it."""
        return self._even_batches.value

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._even_batches.value = value

    @property
    def span(self) -> int:
        """Samples of all processes in one round."""
        size: int = self.batch_size
        return size if self.split_batches else size * self.num_processes

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        if self.split_batches:
            return batches - self._misses_last_split()
        rounds, extra = divmod(batches, self.num_processes)
        if self.drop_last or extra == 0:
            return rounds
        if self.even_batches:
            return rounds + 1
        return rounds + (self.process_index < extra)

    def _misses_last_split(self) -> bool:
        """Return True if the last batch to split is so short that this process gets nothing of it."""
        if self.even_batches or self.drop_last or not is_plain(self.batch_sampler):
            return False
        short: int = len(self.batch_sampler.sampler) % self.batch_size
        return 0 < short <= self._offset

    @property
    def _share(self) -> int:
        return self.span // self.num_processes

    @property
    def _offset(self) -> int:
        return self.process_index * self._share

    def __iter__(self) -> Iterator[list[int]]:
        if not is_plain(self.batch_sampler):
            yield from self._walk_splits() if self.split_batches else self._walk_batches()
            return
        # A single process iterates the sampler, exactly as torch does.
        indices = _indices_of(self.sampler) if self.num_processes > 1 else None
        yield from self._walk_samples() if indices is None else self._take_shares(indices)

    def iterate_from(self, start: int) -> Iterator[list[int]]:
        """Iterate without the first `start` batches, which cost nothing where this process computes its share."""
        own = type(self).__iter__ is BatchSamplerShard.__iter__
        indices = _indices_of(self.sampler) if own and is_plain(self.batch_sampler) else None
        yield from islice(self, start, None) if indices is None else self._take_shares(indices, start)

    def _take_shares(self, indices: Indices, skipped: int = 0) -> Iterator[list[int]]:
        length, span, share = indices.length, self.span, self._share
        whole = length - length % span
        start = self._offset + skipped * span
        for reach in range((skipped + 1) * span, whole + 1, span):
            yield indices.take(start, start + share, reach)
            start += span
        indices.finish()
        if whole == length or self.drop_last or skipped * span > whole:
            return
        stop = start + share if self.even_batches else min(start + share, length)
        batch: list[int] = []
        while start < stop:
            at = start % length
            piece = indices.take(at, min(length, at + stop - start), length)
            batch += piece
            start += len(piece)
        if batch:
            yield batch

    def _walk_samples(self) -> Iterator[list[int]]:
        span, start = self.span, self._offset
        stop = start + self._share
        head: list[int] = []
        for group in _chunks(self.sampler, span):
            head = head or group[:]
            if len(group) == span:
                yield group[start:stop]
            elif not self.drop_last:
                yield from self._share_of_short(group, head, start, stop)

    def _walk_splits(self) -> Iterator[list[int]]:
        start, stop = self._offset, self._offset + self._share
        head: list[int] = []
        for batch in self.batch_sampler:
            head = head or list(batch)
            if len(batch) == self.batch_size:
                yield batch[start:stop]
            elif len(batch) > self.batch_size:
                raise ValueError(
                    f"the batch sampler gave a batch of {len(batch)} indices, more than its batch_size "
                    f"{self.batch_size}: give it the size of its largest batch, or use split_batches=False"
                )
            elif not self.drop_last:
                yield from self._share_of_short(list(batch), head, start, stop)

    def _share_of_short(
        self, group: list[int], head: Sequence[int], start: int, stop: int
    ) -> Iterator[list[int]]:
        if self.even_batches:
            group = group + list(islice(cycle(head), max(0, stop - len(group))))
        if start < len(group):
            yield group[start:stop]

    def _walk_batches(self) -> Iterator[list[int]]:
        head: list[Any] = []
        self.num_new = None
        for group in _chunks(self.batch_sampler, self.num_processes):
            head = head or group
            full = self.batch_size is None or len(group[-1]) == self.batch_size
            if full and len(group) == self.num_processes:
                yield group[self.process_index]
            elif self.drop_last:
                continue
            elif self.even_batches:
                self.num_new = len(group) if self.batch_size is None else None
                yield self._complete(group, head)
            elif self.process_index < len(group):
                yield group[self.process_index]

    def _complete(self, group: list[Any], head: list[Any]) -> Any:
        """Return this process's batch of a last round that is short, completed from the first round."""
        place = self.process_index
        absent = place - len(group)
        if self.batch_size is None:
            return group[place] if absent < 0 else head[absent % len(head)]
        batch = [] if absent >= 0 else list(group[place])
        used = sum(max(0, self.batch_size - len(before)) for before in group[:place])
        used += max(0, absent) * self.batch_size
        filler = [index for batch in head for index in batch]
        missing = range(used, used + max(0, self.batch_size - len(batch)))
        return batch + [filler[position % len(filler)] for position in missing]


class SkipBatchSampler(_Over):
    """The batches of another batch sampler after its first `skip_batches`."""

    def __init__(self, batch_sampler: BatchSampler | Iterable[Any], skip_batches: int = 0) -> None:
        super().__init__(batch_sampler)
        self.skip_batches = skip_batches
        self.num_processes: int = getattr(batch_sampler, "num_processes", 1)
        self.split_batches: bool = getattr(batch_sampler, "split_batches", False)

    def __len__(self) -> int:
        return max(0, self.total_length - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        return batches_from(self.batch_sampler, self.skip_batches)

    def iterate_from(self, start: int) -> Iterator[Any]:
        """Iterate without the first `start` of the batches that are left."""
        return batches_from(self.batch_sampler, self.skip_batches + start)


def share_of(num_processes: int, process_index: int, mesh: Any = None) -> tuple[int, int]:
    """Return how many shares of the samples there are, and which one is this process's.

    Processes that differ only in the `tp` and `cp` dimensions of the mesh get the same samples.

    Args:
        num_processes: of the run.
        process_index: the rank.
        mesh: a device mesh with names, whose last dimensions are `tp` and `cp`; None without.

    Raises:
        ValueError: the process is not among those that shares are for.
    """
    if mesh is not None:
        sizes = {name: int(mesh[name].size()) for name in mesh.mesh_dim_names or ()}
        for name in _SAME_SAMPLES:
            process_index //= sizes.get(name, 1)
        num_processes = 1
        for name in _OWN_SAMPLES:
            num_processes *= sizes.get(name, 1)
    if not 0 <= process_index < num_processes:
        raise ValueError(
            f"process_index {process_index} is not among the {num_processes} processes 0..{num_processes - 1}"
        )
    return num_processes, process_index


def check_split(batch_size: int | None, num_processes: int) -> None:
    """Raise ValueError unless batches of this size can be split into equal shares.

    Args:
        batch_size: None where it is unknown.
        num_processes: how many shares.
    """
    if batch_size is None:
        raise ValueError(
            "split_batches=True needs a batch size: give the batch sampler a batch_size attribute, "
            "or use split_batches=False"
        )
    if batch_size % num_processes != 0:
        raise ValueError(
            f"split_batches=True needs a batch size that is a round multiple of the number of processes: "
            f"{batch_size} % {num_processes} = {batch_size % num_processes}"
        )


def sampler_chain(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and those within it, from the outermost to that of single indices."""
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def is_plain(batch_sampler: object) -> bool:
    """Return True if the batches are those that torch's BatchSampler makes of its sampler."""
    return isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__iter__ is BatchSampler.__iter__


def find_shared_order(sampler: Any) -> DistributedSampler[Any] | None:
    """Return torch's DistributedSampler under plain batches: its ranks take turns in one order, and repeat its start.

    None for other samplers.
    """
    *outer, inner = sampler_chain(sampler)
    is_torchs = isinstance(inner, DistributedSampler) and type(inner).__iter__ is DistributedSampler.__iter__
    plain = all(is_plain(part) or type(part) is SkipBatchSampler for part in outer)
    return inner if is_torchs and plain else None


def find_ends(sampler: Any, num_ranks: int, *, drop_last: bool) -> tuple[int | None, ...]:
    """Return where the samples of each rank's last batch end that are no repeats, as the end of a slice.

    Empty where there are none, and for other samplers than those with a shared order.

    Args:
        sampler: of one of the ranks.
        num_ranks: how many share the order.
        drop_last: whether a last batch that is short is left out.
    """
    ranked, size = find_shared_order(sampler), getattr(sampler, "batch_size", None)
    if ranked is None or (drop_last and len(ranked) % (size or 1)):
        return ()
    repeats = max(0, ranked.total_size - len(ranked.dataset))  # type: ignore[arg-type]
    end = 0 if size is None else -1
    return (None,) * (num_ranks - repeats) + (end,) * repeats if repeats else ()


def batches_from(batch_sampler: Any, start: int) -> Iterator[Any]:
    """Iterate a batch sampler without its first batches.

    Args:
        batch_sampler: of batches or of single indices.
        start: how many to leave out; torch's own samplers skip them without drawing them one by one.
    """
    if start == 0:
        return iter(batch_sampler)
    if hasattr(type(batch_sampler), "iterate_from"):
        rest: Iterator[Any] = batch_sampler.iterate_from(start)
        return rest
    if is_plain(batch_sampler):
        return BatchSamplerShard(batch_sampler, even_batches=False).iterate_from(start)
    return islice(batch_sampler, start, None)


def start_at(batch_sampler: Any, number: int) -> Any:
    """Return a sampler like this one that starts at a batch of the user's own batch sampler.

    Args:
        batch_sampler: of one process, or its share; it stays as it is.
        number: of the batch.
    """
    if type(batch_sampler) is not BatchSamplerShard:
        return SkipBatchSampler(batch_sampler, number)
    shard = copy.copy(batch_sampler)
    shard.batch_sampler = SkipBatchSampler(batch_sampler.batch_sampler, number)
    return shard


def _indices_of(sampler: object) -> Indices | None:
    """Return the indices of the sampler's next epoch, None for a sampler that must be iterated."""
    iterate = getattr(type(sampler), "__iter__", None)
    if isinstance(sampler, SequentialSampler) and iterate is SequentialSampler.__iter__:
        return SequentialIndices(len(sampler))
    if isinstance(sampler, SeedableRandomSampler) and iterate is SeedableRandomSampler.__iter__:
        sampler.seed_epoch()
        return RandomIndices(sampler, on_end=sampler.end_epoch)
    if isinstance(sampler, RandomSampler) and iterate is RandomSampler.__iter__:
        return RandomIndices(sampler)
    return None


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of `size` consecutive items; the last one may be shorter."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def get_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return what chooses the samples of a loader, under its batch sampler; None where nothing does.

    Args:
        dataloader: prepared or not.
    """
    outer = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    return getattr(outer, "sampler", None)


def name_sampler(dataloader: DataLoader[Any], sampler: Any) -> dict[str, Any]:
    """Return an outer sampler for the loader by its name there."""
    return {"sampler" if dataloader.batch_sampler is None else "batch_sampler": sampler}
