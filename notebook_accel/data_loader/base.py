"""What all prepared data loaders have in common: they know where they stand, and those of torchdata can save it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .. import detect
from ..combinations import refuse
from ..gradient_state import GradientState
from ..handlers import require_torchdata
from ..nested import ignorant_find_batch_size, send_to_device
from ..runtime import GradientFlags, Runtime, current
from .failing import end_processes, start_processes
from .iterable import IterableDatasetShard
from .own import KeepsOwn, without_iterator
from .resume import Epoch, EpochState, ResumableSampler, order_of, restore_order
from .rounds import ALONE, RECEIVES, WORKERS, check_readers
from .samplers import SkipBatchSampler, find_shared_order, is_plain, name_sampler, sampler_chain, start_at

if TYPE_CHECKING:
    from typing_extensions import Self

_EPOCH: Final = "_iteration"
_ORDER: Final = "_order"
_FINISHED: Final = "_iterator_finished"
_NEVER_MOVED: Final = frozenset((str, bytes, bool, int, float, type(None)))


def outer_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return what the loader takes from its dataset by: the batch sampler, or the sampler where it has none."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


class PreparedLoader(KeepsOwn):
    """A data loader that knows its epoch, its last batch and how many samples of that are no repeats.

    Attributes:
        end_of_dataloader: True from when the last batch is handed out.
        remainder: samples of the last global batch that are no repeats; 0 where it is full, -1 where unknown or
            where an incomplete one is dropped.
        num_unique: samples of the current global batch that are no repeats, None where it is not known to have some.
        iteration: the epoch, counted from 0; `set_epoch` overwrites it.
        skip_batches: batches left out at the start of an iteration.
        rows: samples of the batch handed out last where other loaders are iterated too; None where unknown.
        batches_seen: batches handed out in this iteration.
        length: batches of this iteration, None where nobody knows.
        epoch_state: what decides the order of its epochs.
        shards: how many processes the dataset or its sampler was shared out to before it was prepared; 1 where not.
        is_led: samplers without a generator draw the order of an epoch from rank 0's random numbers, as all ranks do.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    num_unique: int | None = None
    rows: int | None = None
    batches_seen: int = 0
    length: int | None = None
    shards: int = 1
    is_led: bool = False
    use_stateful_dataloader: bool = False
    gradient_state = property(lambda self: GradientState(), doc="Where gradient accumulation stands.")

    def __new__(cls, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> Self:
        """Return an empty loader; where it is to be stateful, of the subclass that `stateful_class` makes."""
        if not use_stateful_dataloader or cls.use_stateful_dataloader:
            return super().__new__(cls)
        require_torchdata()
        kind: Any = cls
        loader: Self = super().__new__(stateful_class(kind))
        return loader

    def __init__(
        self,
        dataset: Any,
        *,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        drop_last_round: bool = False,
        non_blocking: bool = False,
        iteration: int = 0,
        runtime: Runtime | None = None,
        **kwargs: Any,
    ) -> None:
        if use_stateful_dataloader != self.use_stateful_dataloader:
            raise TypeError("give use_stateful_dataloader by its name")
        self.epoch_state = EpochState()
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        self.iteration = iteration
        self._drop_last = drop_last_round
        self._non_blocking = non_blocking
        self.first_sample = 0
        self._origin: PreparedLoader | None = None
        self._runtime = runtime if runtime is not None else current()

    @property
    def runtime(self) -> Runtime | None:
        """The runtime given, else that of the process."""
        return self._runtime if self._runtime is not None else current()

    @property
    def base_dataloader(self) -> PreparedLoader:
        """This loader: what it reads is its own, where others wrap a loader of torch."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        own = None if self.own is None else without_iterator(self.own)
        return {**self.__dict__, "own": own, "_runtime": None, "_iterator": None}

    def renew(self) -> dict[str, Any]:
        """Return what a loader that starts anew in this one's epoch has in place of this one's attributes."""
        return {"end_of_dataloader": False, "remainder": -1, "_origin": self, "_runtime": self._runtime}

    def skip(self, num_batches: int) -> dict[str, Any]:
        """Return the attributes of a loader that leaves out more of this one's batches."""
        if isinstance(self.dataset, IterableDataset):
            return {"skip_batches": self.skip_batches + num_batches}
        return name_sampler(self, SkipBatchSampler(outer_sampler(self), num_batches))

    def start_at_batch(self, number: int) -> dict[str, Any]:
        """Return the attributes of a loader that starts at this batch of the user's own loader.

        What follows is shared out to the processes as a whole epoch is.
        """
        return name_sampler(self, start_at(outer_sampler(self), number))

    @property
    def own_batch_size(self) -> int:
        """Samples in a batch of the user's own loader; 1 where they vary, so that batches count as samples."""
        if self.shards > 1:  # each of the user's loaders reads a part of a round
            return self._round_size() or self.shards
        shares = isinstance(self.dataset, IterableDatasetShard)
        return getattr(self.dataset if shares else outer_sampler(self), "batch_size", None) or 1

    @property
    def round_size(self) -> int | str:
        """Samples that all processes read with one batch each; the number of batches where their sizes vary.

        A text that names the readers, where each has a part of the dataset of its own: samples have no order then.
        """
        owner = self.dataset if isinstance(self.dataset, IterableDatasetShard) else outer_sampler(self)
        num = int(getattr(owner, "num_processes", 1)) * self.shards
        if self._has_own_part or (isinstance(self.dataset, IterableDataset) and self.num_workers > 0):
            return f"{num} processes with num_workers={self.num_workers}"
        return self._round_size() or num

    @property
    def _has_own_part(self) -> bool:
        """Whether nobody knows which samples the other processes read."""
        return self.shards > 1 and find_shared_order(outer_sampler(self)) is None

    def reset(self) -> None:
        """Forget where the last iteration stood."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.batches_seen = 0

    def begin(self) -> Epoch:
        """Note that an iteration starts, and return its epoch."""
        self.reset()
        self.length = self._length()
        epoch = self.epoch_state.begin(self.round_size)
        if not self._drop_last:
            self.remainder = self._count_remainder()
        return epoch

    def end(self) -> None:
        """Note that the iteration ended that began last."""
        self.epoch_state.end(self.epoch_state.newest)

    def _track(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate the batches as one epoch."""
        epoch = self.begin()
        self.set_epoch(self.iteration)
        try:
            yield from self._hand_out(epoch, batches)
        finally:
            epoch.reader = None  # what a shell keeps of an interrupt must not keep it
        loader: PreparedLoader | None = self
        while loader is not None:
            loader.iteration = self.iteration + 1 if loader is self else self.iteration
            loader = loader._origin
        self.epoch_state.end(epoch)

    def _hand_out(self, epoch: Epoch, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate the batches, and note for each that the loop over this loader is the one that the code is in."""
        flags = GradientFlags() if (runtime := detect.find_runtime(self)) is None else runtime.gradient
        iteration = flags.begin(self)
        seen, is_last = 0, False
        try:
            for batch in batches():
                seen += 1
                # another iterator over this loader may have changed its attributes meanwhile
                self.batches_seen, is_last = seen, self.end_of_dataloader
                iteration.is_last, iteration.remainder, iteration.is_single = is_last, self.remainder, False
                iteration.num_unique = self.num_unique
                self.rows = ignorant_find_batch_size(batch) if len(flags.iterations) > 1 else None
                epoch.ended = is_last
                if flags.latest is not iteration:
                    flags.give_turn(iteration)
                if self.epoch_state.epochs[-1:] != [epoch]:
                    self.epoch_state.give_turn(epoch)
                yield batch
                self.end_of_dataloader = False
        except BaseException as error:
            iteration.is_left = True
            end_processes(error, epoch.leave(), self.persistent_iterator)
            raise
        self.end_of_dataloader = is_last
        flags.end(iteration)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, of samplers and dataset too."""
        self.iteration = epoch
        for part in (*self._sampler_chain(), self.dataset, self.own):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _read_all(self) -> Iterator[Any]:
        """Return torch's own iterator of this loader, torchdata's, or that of the user's class."""
        epoch = self.epoch_state.newest
        if isinstance(self.dataset, IterableDataset):  # no sampler draws its order
            self.epoch_state.draw(epoch, [])
        here = torch.get_rng_state() if self.epoch_state.goes_on else None
        begin: Callable[[], Any] = super().__iter__
        if self.own_iteration and self._reads:
            begin = functools.partial(self.read_own, epoch, self._index_sampler)
        epoch.reader = iterator = start_processes(begin) if self.num_workers else begin()
        if here is not None:
            torch.set_rng_state(here)  # the process that began the epoch drew the seed of loader processes
        return iterator

    @property
    def _index_sampler(self) -> Any:
        sampler = outer_sampler(self)
        if isinstance(self.dataset, IterableDataset) or hasattr(sampler, "load_state_dict"):
            return sampler
        runtime = self.runtime if self.is_led else None
        comm = None if runtime is None or runtime.comm.world_size == 1 else runtime.comm
        return ResumableSampler(sampler, self.epoch_state, comm)

    @property
    def _reads(self) -> bool:
        """True where this process reads, False where it only receives."""
        return True

    def _batches_to_skip(self) -> int:
        """Return the batches to read and drop at the start of this iteration."""
        return self.skip_batches

    def sender_to(self, device: torch.device) -> Callable[[Any], Any]:
        """Return a function that puts the batches of an epoch, called for each in order, on the device."""
        runtime = self.runtime
        if runtime is not None and runtime.feed is not None and device == runtime.device:
            return runtime.feed.open()
        return functools.partial(on_device, device=device, non_blocking=self._non_blocking)

    def _note_state(self, epoch: Epoch) -> None:
        """Note the state after the current batch of an epoch; only stateful loaders have one."""

    def _reach_end(self, epoch: Epoch) -> None:
        """Note that the current batch is the last one of an epoch."""
        self.end_of_dataloader = True

    def _sampler_chain(self) -> Iterator[Any]:
        return sampler_chain(outer_sampler(self))

    def __len__(self) -> int:
        return max(0, self._count_batches() - self.skip_batches)

    def _count_batches(self) -> int:
        """Return the batches of an epoch that leaves none out; TypeError where nobody knows."""
        return len(self.take_own_part(outer_sampler(self))) if self.own_iteration else super().__len__()

    def _length(self) -> int | None:
        try:
            return len(self)
        except Exception:  # of the user's own sampler or dataset; the length is for progress bars only
            return None

    def get_sampler(self) -> Any:
        """Return the sampler of single indices, None where the batch sampler has none."""
        return getattr(outer_sampler(self), "sampler", None)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of single indices."""
        outer_sampler(self).sampler = sampler

    @property
    def total_batch_size(self) -> int:
        """Samples of all processes in one round; ValueError where batches have no fixed size."""
        size = self._round_size()
        if size is None:
            raise ValueError(
                "this data loader has no total batch size, its batches have no fixed size: "
                "give its batch sampler a batch_size attribute"
            )
        return size

    def _round_size(self) -> int | None:
        if isinstance(self.dataset, IterableDatasetShard):
            return None if self.dataset.batch_size is None else self.dataset.span
        sampler = outer_sampler(self)
        size: int | None = getattr(sampler, "batch_size", None)
        if size is None or getattr(sampler, "split_batches", False):
            return size
        return size * int(getattr(sampler, "num_processes", 1)) * self.shards

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset; TypeError where its length is unknown."""
        dataset: Any = self.dataset
        return int(dataset.total_length) if hasattr(type(dataset), "total_length") else len(dataset)

    def _count_remainder(self) -> int:
        size, samples = self._round_size(), None if self._has_own_part else self._count_samples()
        return -1 if size is None or samples is None else (samples - self.first_sample) % size

    def _count_samples(self) -> int | None:
        """Return the samples of one epoch over all processes: of the sampler where it is known to be sized."""
        if self.shards > 1 and (ranked := find_shared_order(outer_sampler(self))) is not None:
            return ranked.total_size if ranked.drop_last else len(ranked.dataset)  # type: ignore[arg-type]
        try:
            if not isinstance(self.dataset, IterableDataset):
                batches = [part for part in self._sampler_chain() if isinstance(part, BatchSampler)]
                if batches and is_plain(batches[-1]):
                    return len(batches[-1].sampler)  # type: ignore[arg-type]
            return self.total_dataset_length
        except (TypeError, NotImplementedError):
            return None

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes to go on after the batch handed out last.

        Raises:
            ValueError: the loader was not prepared with `use_stateful_dataloader`.
        """
        raise ValueError(
            "this data loader has no state: prepare it with use_stateful_dataloader=True, or use skip_first_batches "
            "to go on in the middle of an epoch"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration go on where the state was taken.

        Raises:
            ValueError: as `state_dict` does, or the state does not fit this loader.
        """
        self.state_dict()

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: states are taken before a batch is read ahead."""


class StatefulLoader(PreparedLoader):
    """A prepared loader whose `state_dict` is that of torchdata, taken before the next batch is read ahead.

    The epoch and the order of its samples are added to it. So a new loader goes on with the very next batch. The
    state of the last batch starts the next epoch.

    `stateful_class` puts this class before a prepared loader, and torchdata's loader after both.
    """

    use_stateful_dataloader = True
    next_iter_state: Any
    _kind: type[PreparedLoader]

    def __init__(self, *args: Any, use_stateful_dataloader: bool = True, **kwargs: Any) -> None:
        self._state: dict[str, Any] | None = None
        self._goes_on = False  # another process read the first batches of the next epoch
        self._inside = False  # another process read the first batches of this epoch
        super().__init__(*args, use_stateful_dataloader=use_stateful_dataloader, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_empty, (self._kind,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_initial_iter_for_state_dict": False}

    def renew(self) -> dict[str, Any]:
        return super().renew() | {"_state": None, "_goes_on": False, "next_iter_state": None}

    def start_at_batch(self, number: int) -> dict[str, Any]:
        raise refuse("stateful, other processes")

    def _get_iterator(self) -> Any:
        state = self.next_iter_state
        iterator = super()._get_iterator()
        if state is not None:
            # torchdata adds the batches that it reads again to the count that it starts from.
            parts = state[WORKERS] if self.num_workers else state
            iterator._num_yielded = parts["_snapshot_step"] if self.num_workers else parts[ALONE]
            iterator._num_yielded += state.get("_steps_since_snapshot", 0)
        return iterator

    def begin(self) -> Epoch:
        epoch = super().begin()
        self._inside, self._goes_on = self._goes_on, False
        self.epoch_state.goes_on |= self._inside
        return epoch

    def _batches_to_skip(self) -> int:
        return 0 if self._inside else self.skip_batches

    def _inner_state(self, epoch: Epoch) -> dict[str, Any]:
        state: dict[str, Any] = epoch.reader.state_dict() if self._reads else {RECEIVES: True}
        return state

    def _note_state(self, epoch: Epoch) -> None:
        noted = {_FINISHED: False, _EPOCH: self.iteration}
        epoch.saved = self._state = self._inner_state(epoch) | noted

    def _reach_end(self, epoch: Epoch) -> None:
        super()._reach_end(epoch)
        order = order_of(outer_sampler(self))
        noted = {_FINISHED: True, _EPOCH: self.iteration + 1, _ORDER: order}
        epoch.saved = self._state = self._inner_state(epoch) | noted

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if self._state is not None and self._state[_FINISHED]:
            self._state = {**self._state, _EPOCH: epoch}
        current = self.epoch_state.current
        if current is not None and current.saved is not None and current.saved[_FINISHED]:
            current.saved = {**current.saved, _EPOCH: epoch}

    def state_dict(self) -> dict[str, Any]:
        current = self.epoch_state.current
        state = self._state if current is None or current.saved is None else current.saved
        if state is None:
            return {_FINISHED: True, _EPOCH: self.iteration, _ORDER: order_of(outer_sampler(self))}
        return dict(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        finished = bool(state_dict.get(_FINISHED, False))
        if self._reads and not finished:
            check_readers(state_dict, self.num_workers)
        order = state_dict.get(_ORDER)
        if order is not None:
            restore_order(outer_sampler(self), order)
        # Persistent workers draw no seed for a second epoch, but workers that start for it here do.
        self.epoch_state.next_order = order if self.persistent_workers else None
        torchdata_loader: Any = super(PreparedLoader, self)
        torchdata_loader.load_state_dict(state_dict if self._reads and not finished else {})
        self.iteration = state_dict.get(_EPOCH, self.iteration)
        self._goes_on = not finished
        self._state = {_EPOCH: self.iteration, _FINISHED: finished, **state_dict}
        self.epoch_state.leave_all()


@functools.cache
def stateful_class(kind: Any) -> Any:
    """Return the subclass of a class of prepared loaders that is a `StatefulLoader` and torchdata's loader too.

    torchdata is imported here, and only here, because it is optional.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    return type(f"Stateful{kind.__name__}", (StatefulLoader, kind, StatefulDataLoader), {"_kind": kind})


def _make_empty(kind: Any) -> Any:
    return object.__new__(stateful_class(kind))


def on_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return a batch on a device, the same object where all of it is there already.

    Args:
        batch: nested lists, tuples and dicts of tensors and other values.
        device: where its tensors go.
        non_blocking: copy from pinned memory without waiting.
    """
    if _lies_on(batch, device):
        return batch
    return send_to_device(batch, device, non_blocking=non_blocking)


def _lies_on(batch: Any, device: torch.device) -> bool:
    """Return True if nothing in the batch need be moved; False too where only `send_to_device` can tell."""
    kind = type(batch)
    if kind is torch.Tensor:
        return bool(batch.device == device)
    if kind is dict:
        batch = batch.values()
    elif kind is not list and kind is not tuple:
        return kind in _NEVER_MOVED
    for part in batch:  # noqa: SIM110 - all() over a generator takes twice the time
        if not _lies_on(part, device):
            return False
    return True
