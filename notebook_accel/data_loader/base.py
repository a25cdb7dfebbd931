"""What all prepared data loaders have in common: where they stand, for gradient accumulation and metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .. import runtime as process
from ..nested import send_to_device
from ..runtime import GradientFlags, Runtime
from .config import require_torchdata
from .iterable import IterableDatasetShard
from .resume import Course, ResumableSampler
from .samplers import is_plain, sampler_chain

if TYPE_CHECKING:
    from typing_extensions import Self

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
_NEVER_MOVED: Final = frozenset((str, bytes, bool, int, float, type(None)))


def options_of(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that made the loader, except those that choose samples and batches."""
    return {name: getattr(dataloader, name) for name in _OPTIONS if hasattr(dataloader, name)}


def outer_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return what the loader takes from its dataset by: the batch sampler, or the sampler where it has none."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler


class PreparedLoader(DataLoader[Any]):
    """A data loader that knows its epoch, its last batch and how many samples of that are no repeats.

    Attributes:
        end_of_dataloader: True from when the last batch is handed out.
        remainder: samples of the last global batch that are no repeats; 0 where it is full, -1 where unknown or
            where an incomplete one is dropped.
        iteration: the epoch, counted from 0; `set_epoch` overwrites it.
        skip_batches: batches left out at the start of an iteration.
        batches_seen: batches handed out in this iteration.
        length: batches of this iteration, None where nobody knows.
        course: what decides the order of its epochs.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    batches_seen: int = 0
    length: int | None = None
    use_stateful_dataloader: bool = False

    def __new__(cls, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any) -> Self:
        """Return a loader of torchdata where one is asked for: it is a subclass of the one that is named."""
        if not use_stateful_dataloader or cls.use_stateful_dataloader:
            return super().__new__(cls)
        require_torchdata()
        from .stateful import stateful_class

        made: Self = super().__new__(stateful_class(cls))
        return made

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
        self.course = Course()
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        self.iteration = iteration
        self._drop_last = drop_last_round
        self._non_blocking = non_blocking
        self._left_early = False
        self._origin: PreparedLoader | None = None
        self._runtime = runtime if runtime is not None else process.current()

    @property
    def runtime(self) -> Runtime | None:
        """The runtime given, else that of the process."""
        return self._runtime if self._runtime is not None else process.current()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runtime": None, "_iterator": None}

    def after(self, skip_batches: int, samplers: dict[str, Any]) -> Self:
        """Return a loader like this one that reads and drops more batches and takes samples by other samplers.

        Both are in the same epoch, and once its end is reached by the new one, both are in the next.
        """
        skipped = skip_batches + sum(getattr(part, "skip_batches", 0) for part in samplers.values())
        course, epoch = self.course.after(self.iteration, skipped)
        made: Self = object.__new__(type(self))
        # Not by assignment, which torch forbids for samplers once a loader is made: this one is being made.
        made.__dict__.update(
            self.__getstate__(),
            skip_batches=self.skip_batches + skip_batches,
            course=course,
            iteration=epoch,
            end_of_dataloader=False,
            remainder=-1,
            _origin=self,
            _runtime=self._runtime,
            _left_early=False,
            **samplers,
        )
        return made

    def reset(self) -> None:
        """Forget where the last iteration stood."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.batches_seen = 0

    def begin(self) -> None:
        """Note that an iteration starts."""
        self.reset()
        self.length = self._length()
        self.course.begin()
        if not self._drop_last:
            self.remainder = self._count_remainder()
        if (runtime := self.runtime) is not None:
            _forget_left(runtime.gradient)
            runtime.gradient.begin(self)

    def end(self) -> None:
        """Note that the iteration ended."""
        self.course.end()
        if (runtime := self.runtime) is not None:
            runtime.gradient.end(self)

    def _track(self, batches: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Iterate the batches as one epoch.

        A loader that is left early stays the active one until another begins: metrics of its last batch are
        still to be gathered.
        """
        self.begin()
        self.set_epoch(self.iteration)
        try:
            for batch in batches():
                self.batches_seen += 1
                yield batch
        except BaseException:
            self._left_early = True
            raise
        loader: PreparedLoader | None = self
        while loader is not None:
            loader.iteration = self.iteration + 1 if loader is self else self.iteration
            loader = loader._origin
        self.end()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, of samplers and dataset too."""
        self.iteration = epoch
        for part in (*self._sampler_chain(), self.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def _read_all(self) -> Iterator[Any]:
        """Return torch's own iterator of this loader, or torchdata's."""
        if isinstance(self.dataset, IterableDataset):  # no sampler decides its order, nor notes that it did
            self.course.draw([])
        if not self.course.goes_on:
            return super().__iter__()
        here = torch.get_rng_state()
        iterator = super().__iter__()
        torch.set_rng_state(here)  # the seed of loader processes was drawn when the epoch was begun
        return iterator

    @property
    def _index_sampler(self) -> Any:
        sampler = outer_sampler(self)
        if isinstance(self.dataset, IterableDataset) or hasattr(sampler, "load_state_dict"):
            return sampler
        return ResumableSampler(sampler, self.course)

    def _batches_to_skip(self) -> int:
        """Return the batches to read and drop at the start of this iteration."""
        return self.skip_batches

    def sender_to(self, device: torch.device) -> Callable[[Any], Any]:
        """Return what puts the batches of an epoch, in order, on the device."""
        runtime = self.runtime
        if runtime is not None and runtime.feed is not None and device == runtime.device:
            return runtime.feed.open()
        return functools.partial(on_device, device=device, non_blocking=self._non_blocking)

    def _note_state(self) -> None:
        """Note the state that goes on after the batch at hand; nothing here, a stateful loader has one."""

    def _reach_end(self) -> None:
        """Note that the batch at hand is the last one."""
        self.end_of_dataloader = True
        self.course.reach_end()

    def _sampler_chain(self) -> Iterator[Any]:
        return sampler_chain(outer_sampler(self))

    def __len__(self) -> int:
        return max(0, self._count_batches() - self.skip_batches)

    def _count_batches(self) -> int:
        """Return the batches of an epoch that leaves none out; TypeError where nobody knows."""
        return super().__len__()

    def _length(self) -> int | None:
        try:
            return len(self)
        except Exception:  # the user's own sampler or dataset: it is asked for a progress bar only
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
        return size * int(getattr(sampler, "num_processes", 1))

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset; TypeError where its length is unknown."""
        dataset: Any = self.dataset
        return int(dataset.total_length) if hasattr(type(dataset), "total_length") else len(dataset)

    def _count_remainder(self) -> int:
        size, samples = self._round_size(), self._count_samples()
        return -1 if size is None or samples is None else samples % size

    def _count_samples(self) -> int | None:
        """Return the samples of one epoch over all processes: of the sampler where it is known to be sized."""
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
        return None


def _forget_left(flags: GradientFlags) -> None:
    for reference in list(flags.loaders):
        loader = reference()
        if isinstance(loader, PreparedLoader) and loader._left_early:
            flags.end(loader)
            loader._left_early = False


def on_device(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return the batch on the device: itself where all of it lies there."""
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
