"""The accelerator's collectives."""

from __future__ import annotations

from typing import Any

import torch

from .. import nested
from ..comm import ops
from .base import Shared


class CollectPart(Shared):
    """Bring what the processes computed together."""

    def gather(self, tensor: Any) -> Any:
        """Concatenate nested tensors over all processes on dim 0; tensors without dimensions give [world]."""
        return ops.gather(self._runtime.comm, tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was computed for a batch, less the samples that only fill the last batch up.

        Args:
            input_data: nested tensors whose dim 0 counts samples, or a list of objects, one per sample.
            use_gather_object: send tensors as objects too, where their shapes differ.
        """
        if use_gather_object or not _is_all_tensors(input_data):
            gathered = ops.gather_object(self._runtime.comm, input_data)
            keep = self._kept_samples()
            return gathered if keep is None else gathered[:keep]
        gathered = ops.gather(self._runtime.comm, input_data)
        keep = self._kept_samples()
        return gathered if keep is None else nested.slice_tensors(gathered, slice(keep))

    def _kept_samples(self) -> int | None:
        """Return how many samples of the batch are no duplicates, None for all; one process has none."""
        if self._runtime.topology.world_size == 1:
            return None
        loader = self._runtime.gradient.active
        if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
            return None
        return int(loader.remainder)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine nested tensors over all processes by `sum`, `mean` or `max` and multiply with `scale`.

        `none` copies them. ValueError for another reduction.
        """
        return ops.reduce(self._runtime.comm, tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad nested tensors along `dim` to the longest of all processes."""
        return ops.pad_across_processes(self._runtime.comm, tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise the flag that `check_trigger` shows to all processes."""
        self._trigger = torch.ones(1, device=self._runtime.device)

    def check_trigger(self) -> bool:
        """Return True in every process if one of them called `set_trigger`, and lower the flag."""
        own = self._trigger if self._trigger is not None else torch.zeros(1, device=self._runtime.device)
        self._trigger = None
        return bool(self._runtime.comm.all_reduce(own, "max").item())


def _is_all_tensors(data: Any) -> bool:
    return all(isinstance(leaf, torch.Tensor) for leaf in nested.flatten(data).leaves)
