"""The share of an iterable dataset that one process gets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from .samplers import check_split


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of an iterable dataset that process `process_index` of `num_processes` gets.

    Every process reads the whole dataset and keeps its part of each round: `batch_size` samples for each process,
    or with `split_batches` `batch_size` samples for all of them. An incomplete last round is dropped with
    `drop_last`, else completed from the first round, so that all processes get the same number of samples. A
    `batch_size` of None stands for 1.

    Attributes:
        skip_samples: samples of the dataset that are read and left out first.
        epoch: seeds the dataset's `generator` at the start of an iteration if it has one and no `set_epoch`.
        remainder: samples of the last round that are no repeats, 0 where it was complete; -1 until it is known.

    Raises:
        ValueError: `split_batches` with a batch size that is no multiple of `num_processes`.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_split(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.skip_samples = 0
        self.epoch = 0
        self.remainder = -1

    @property
    def span(self) -> int:
        """Samples of all processes in one round."""
        size = self.batch_size or 1
        return size if self.split_batches else size * self.num_processes

    @property
    def total_length(self) -> int:
        """Samples of the whole dataset; TypeError where its length is unknown."""
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, of the dataset too."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds, short = divmod(max(0, self.total_length - self.skip_samples), self.span)
        if short and not self.drop_last:
            rounds += 1
        return rounds * (self.span // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        self.remainder = -1
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        share = self.span // self.num_processes
        start = self.process_index * share
        samples = islice(self.dataset, self.skip_samples, None)
        head: list[Any] = []
        while group := list(islice(samples, self.span)):
            head = head or group
            short = len(group)
            if short == self.span:
                yield from group[start : start + share]
                continue
            if not self.drop_last:
                group = group + list(islice(cycle(head), self.span - short))
                self.remainder = short
                yield from group[start : start + share]
            return
        self.remainder = 0
