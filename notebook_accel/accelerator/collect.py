"""The accelerator's collectives."""

from __future__ import annotations

from typing import Any

import torch

from .. import nested
from ..comm import ops
from ..data_loader.base import outer_sampler
from ..data_loader.samplers import sampler_chain
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

        Args:
            input_data: nested tensors whose dim 0 counts samples, or a list of objects, one per sample. An empty list
                counts as one of objects: those of other processes may be longer.
            use_gather_object: send tensors as objects too, where their shapes differ.

        Returns:
            The same nested data on every process, where a tensor of shape [n, ...] becomes [num * n, ...] for `num`
            processes that see different batches; for objects one list of all.
        """
        # what loops gather most: walks over it take longer than sending it
        is_tensor = type(input_data) is torch.Tensor
        as_objects = use_gather_object or not (is_tensor or _is_all_tensors(input_data))
        collect = ops.gather_object if as_objects else ops.gather
        gathered = collect(self._strategy.data_comm, input_data)
        keep = self._count_unique_samples()
        if keep is None:
            ranks = self._count_new_ranks()
            return gathered if ranks is None else self._keep_ranks(gathered, input_data, ranks, as_objects)
        if as_objects:
            has_samples = isinstance(gathered, (list, tuple)) or (
                torch.is_tensor(gathered) and gathered.ndim > 0
            )
            return gathered[:keep] if has_samples else gathered
        if is_tensor:
            return gathered[:keep] if gathered.ndim else gathered
        return nested.recursively_apply(lambda tensor: tensor[:keep] if tensor.ndim else tensor, gathered)

    def _count_unique_samples(self) -> int | None:
        """Return how many samples of the batch are no repeats, None where all count."""
        latest = self._runtime.gradient.latest
        if latest is None or latest.loader is None:
            return None
        if latest.is_last and latest.remainder > 0:
            return latest.remainder
        return latest.num_unique

    def _count_new_ranks(self) -> int | None:
        """Return how many processes have a batch that is no repeat, None where all have."""
        latest = self._runtime.gradient.latest
        loader = latest.loader if latest is not None and latest.is_last else None
        if loader is None:
            return None
        found = (getattr(part, "num_new", None) for part in sampler_chain(outer_sampler(loader)))
        return next((number for number in found if number is not None), None)

    def _keep_ranks(self, gathered: Any, own: Any, ranks: int, as_objects: bool) -> Any:
        """Return what the first ranks gave: of tensors, all gave as much."""
        comm = self._strategy.data_comm
        if as_objects:
            sizes = comm.all_gather_object(len(own) if hasattr(own, "__len__") else None)
            return gathered if None in sizes else gathered[: sum(sizes[:ranks])]

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: len(tensor) // comm.world_size * ranks] if tensor.ndim else tensor

        return nested.recursively_apply(cut, gathered)

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


def _is_all_tensors(data: Any) -> bool:
    is_empty = isinstance(data, (list, tuple)) and len(data) == 0
    return not is_empty and all(isinstance(leaf, torch.Tensor) for leaf in nested.flatten(data).leaves)
