"""The accelerator's collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from .. import nested
from ..caller import warn
from ..comm import ops
from ..data_loader.base import outer_sampler
from ..data_loader.samplers import find_ends, sampler_chain
from ..runtime import Iteration
from .base import Shared


class CollectPart(Shared):
    """Collect what the processes computed."""

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all processes; every process calls it.

        All processes means also those that see the same batch, by tensor or context parallel: what they computed comes
        several times. `gather_for_metrics` takes it once.

        Args:
            tensor: nested lists, tuples and dicts of tensors, of the same shapes on all processes.

        Returns:
            The same nested data on every process; a tensor of shape [n, ...] becomes [world_size * n, ...], in the
            order of ranks, and one without dimensions becomes [world_size].
        """
        return ops.gather(self._runtime.comm, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was computed for a batch, without the samples that only complete a batch.

        Only as many samples of the last batch count as the dataset has left, and of a short one before it as it has.
        In one process too: there a `collate_fn` may have padded the batch. Of processes that see the same batch, by
        tensor or context parallel, one counts.

        The batch is that of the loop that the code is in. Where loaders are read in turn, as by `zip`, it is the one of
        those that has as many samples as the data.

        Args:
            input_data: nested tensors whose dim 0 counts samples, or a list of objects, one per sample, or a tuple or
                dict of such lists and tensors. An empty list counts as one of objects: those of other processes may be
                longer.
            use_gather_object: send tensors as objects too, where their shapes differ.

        Returns:
            The same nested data on every process, where a tensor of shape [n, ...] becomes [num * n, ...] for `num`
            processes that see different batches, and a list of objects one of all.

        Raises:
            TypeError: objects that are no list, or a tuple of lists that may be one object per sample.
        """
        # what loops gather most: walks over it take longer than sending it
        is_tensor = type(input_data) is torch.Tensor
        kept = self._find_kept(input_data)
        if use_gather_object or not (is_tensor or _is_all_tensors(input_data)):
            return self._gather_objects(input_data, kept)
        gathered = ops.gather(self._strategy.data_comm, input_data)
        if kept is ALL:
            return gathered
        if is_tensor:
            return kept.cut(gathered, input_data)
        own, everyone = nested.flatten(input_data), nested.flatten(gathered)
        return everyone.rebuild([kept.cut(*pair) for pair in zip(everyone.leaves, own.leaves, strict=True)])

    def _gather_objects(self, data: Any, kept: Kept) -> Any:
        comm = self._strategy.data_comm
        parts = [data] if comm.world_size == 1 else comm.all_gather_object(data)
        if all(map(_is_structure, parts)):
            latest = self._runtime.gradient.latest
            _check_structure(parts, None if latest is None else latest.loader, comm.world_size)
            parts[comm.rank] = data
            return _join_structure(parts, kept, comm.rank)
        if comm.world_size == 1:
            return kept.cut_list(data)
        return kept.cut_list(ops.join_lists(kept.cut_parts(parts)))

    def _find_kept(self, data: Any) -> Kept:
        """Return which samples of what is gathered count: those of the batch that the data is of."""
        flags = self._runtime.gradient
        latest = flags.latest
        if latest is None or latest.loader is None:
            return ALL
        kept = self._find_kept_of(latest)
        if len(flags.iterations) < 2 or not latest.is_single or (rows := _count_rows(data)) is None:
            return kept
        others = [other for other in flags.iterations if other is not latest and other.is_single]
        if not _fits(latest, rows):
            fitting = [other for other in others if _fits(other, rows) and not other.is_left]
            return self._find_kept_of(max(fitting, key=lambda other: other.turn)) if fitting else kept
        beside = [other for other in others if latest.alternates_with(other) and _fits(other, rows)]
        if all(self._find_kept_of(other) == kept for other in beside):
            return kept
        warn(
            f"{1 + len(beside)} loaders are read in turn, their batches have {rows} samples each, and one of them ends "
            "with repeats: gather_for_metrics cannot tell whose these are, and leaves all in. Use gather for what is "
            "computed of each loader; where its end_of_dataloader is true, keep its remainder, unless that is below 1"
        )
        return ALL

    def _find_kept_of(self, iteration: Iteration) -> Kept:
        loader, num_ranks = iteration.loader, self._strategy.data_comm.world_size
        if loader is not None and iteration.is_last:
            if loader.shards == num_ranks > 1:
                ends = find_ends(outer_sampler(loader), num_ranks, drop_last=loader._drop_last)
                if ends:
                    return Kept(by_rank=ends)
            if iteration.remainder > 0:
                return Kept(first=iteration.remainder)
        if iteration.num_unique is not None or loader is None or not iteration.is_last:
            return ALL if iteration.num_unique is None else Kept(first=iteration.num_unique)
        found = (getattr(part, "num_new", None) for part in sampler_chain(outer_sampler(loader)))
        new = next((number for number in found if number is not None), None)
        return ALL if new is None else Kept(by_rank=(None,) * new + (0,) * (num_ranks - new))

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine the tensors of all processes element by element; every process calls it.

        Args:
            tensor: nested lists, tuples and dicts of tensors, of the same shapes on all processes.
            reduction: `sum`, `mean` or `max`; `none` returns copies.
            scale: factor for the result.

        Returns:
            Nested data of the same shapes, on every process.

        Raises:
            ValueError: the reduction is unknown.
        """
        return ops.reduce(self._runtime.comm, tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad tensors to the size of the longest of all processes; every process calls it.

        Args:
            tensor: nested lists, tuples and dicts of tensors.
            dim: the dimension to pad; tensors without it stay as they are.
            pad_index: the value to fill in.
            pad_first: fill in front of the values, not behind them.

        Returns:
            Nested data, whose tensors have one size along `dim` on all processes.
        """
        return ops.pad_across_processes(self._runtime.comm, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag in this process, for `check_trigger` of all processes."""
        self.flag_tensor = torch.ones(1, device=self._runtime.device)

    def check_trigger(self) -> bool:
        """Return True in every process if one of them called `set_trigger`, and clear the flag.

        Every process calls it: it is a collective.
        """
        own = (
            self.flag_tensor if self.flag_tensor is not None else torch.zeros(1, device=self._runtime.device)
        )
        self.flag_tensor = torch.zeros(1, device=self._runtime.device)
        return bool(self._runtime.comm.all_reduce(own, "max").item())


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Which samples of what is gathered are no repeats.

    Attributes:
        first: how many from the start on; None for all.
        by_rank: where the samples of each rank end that count, as the end of a slice; empty for all.
    """

    first: int | None = None
    by_rank: tuple[int | None, ...] = ()

    def cut(self, gathered: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor that count.

        Args:
            gathered: of all ranks, which gave as much.
            own: what this rank gave; one without dimensions has no samples.
        """
        if gathered.ndim == 0:
            return gathered
        if not self.by_rank:
            return gathered[: self.first]
        parts = gathered.tensor_split(len(self.by_rank))
        ends = self.by_rank if own.ndim else [None if end else end for end in self.by_rank]
        return torch.cat([part[:end] for part, end in zip(parts, ends, strict=True)])

    def cut_parts(self, parts: list[Any]) -> list[Any]:
        """Return what each rank gave without its repeats."""
        if not self.by_rank or not all(map(_has_samples, parts)):
            return parts
        return [part[:end] for part, end in zip(parts, self.by_rank, strict=True)]

    def cut_list(self, joined: Any) -> Any:
        """Return the first ones of what all ranks gave together."""
        return joined[: self.first] if _has_samples(joined) else joined


ALL: Final = Kept()


def _has_samples(data: Any) -> bool:
    return isinstance(data, (list, tuple)) or (isinstance(data, (torch.Tensor, np.ndarray)) and data.ndim > 0)


def _fits(iteration: Iteration, rows: int) -> bool:
    """Return whether the batch handed out last may have so many samples."""
    return getattr(iteration.loader, "rows", None) in (None, rows)


def _count_rows(data: Any) -> int | None:
    """Return how many samples what is to be gathered has, None where nobody knows."""
    if _is_structure(data):
        values = data.values() if isinstance(data, Mapping) else data
        return next((number for number in map(_count_rows, values) if number is not None), None)
    if isinstance(data, list) and not _is_all_tensors(data):
        return len(data)
    return nested.ignorant_find_batch_size(data)


def _is_structure(data: Any) -> bool:
    """Return True for a container of lists and tensors that have an item for each sample, not all of them tensors.

    Lists of different lengths are objects, one per sample, such as the tokens of texts. So are all lists in a list, if
    there is no tensor beside them.
    """
    if not isinstance(data, (tuple, list, Mapping)) or not data:
        return False
    values = list(data.values()) if isinstance(data, Mapping) else list(data)
    num_tensors = sum(isinstance(value, torch.Tensor) for value in values)
    if num_tensors == len(values) or (num_tensors == 0 and isinstance(data, list)):
        return False
    lengths = {
        len(value) for value in values if isinstance(value, (list, tuple)) and not _is_structure(value)
    }
    columns = (torch.Tensor, list, tuple)
    return len(lengths) < 2 and all(isinstance(value, columns) or _is_structure(value) for value in values)


def _check_structure(parts: list[Any], loader: Any, num_ranks: int) -> None:
    """Raise TypeError where a tuple of lists has as many of these as a batch has samples, and they have others."""
    size = None if loader is None else loader._round_size()
    if size is None or not isinstance(parts[0], tuple):
        return
    for part in parts:
        lengths = {len(value) for value in part if isinstance(value, (list, tuple))}
        if len(part) == size // num_ranks and lengths and len(part) not in lengths:
            raise TypeError(
                f"gather_for_metrics got a tuple of {len(part)} lists of {max(lengths)} items, and a batch has "
                f"{len(part)} samples: make a list of it if each is the object of a sample, or gather each by itself"
            )


def _join_structure(parts: list[Any], kept: Kept, rank: int) -> Any:
    """Return the containers of all ranks as one, each list and tensor in it joined and without repeats.

    Args:
        parts: by rank.
        kept: what is no repeat.
        rank: of this process, whose device tensors get.
    """
    own = parts[rank]
    if all(map(_is_structure, parts)):
        if isinstance(own, Mapping):
            return {key: _join_structure([part[key] for part in parts], kept, rank) for key in own}
        columns = zip(*parts, strict=True)
        joined = [_join_structure(list(column), kept, rank) for column in columns]
        return type(own)(*joined) if hasattr(own, "_fields") else type(own)(joined)
    if not isinstance(own, torch.Tensor):
        return kept.cut_list(ops.join_lists(kept.cut_parts(parts)))
    tensors = [part.to(own.device) for part in parts]
    if own.ndim == 0:
        return own if len(parts) == 1 else kept.cut(torch.stack(tensors), own)
    return kept.cut_list(torch.cat(kept.cut_parts(tensors)))


def _is_all_tensors(data: Any) -> bool:
    is_empty = isinstance(data, (list, tuple)) and len(data) == 0
    return not is_empty and all(isinstance(leaf, torch.Tensor) for leaf in nested.flatten(data).leaves)
