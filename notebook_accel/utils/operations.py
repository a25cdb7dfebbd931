"""The collectives of `comm.ops` for the runtime of this process."""

from __future__ import annotations

from typing import Any

from .. import detect
from ..comm import ops


def gather(tensor: Any) -> Any:
    """Concatenate nested tensors over all processes on dim 0."""
    return ops.gather(detect.ensure().comm, tensor)


def gather_object(object: Any) -> Any:
    """Join the lists of all processes into one, in rank order."""
    return ops.gather_object(detect.ensure().comm, object)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite nested tensors in place with those of one rank."""
    return ops.broadcast(detect.ensure().comm, tensor, from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite the list in place with that of one rank."""
    return ops.broadcast_object_list(detect.ensure().comm, object_list, from_process)


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine nested tensors over all processes by `sum`, `mean` or `max`; `none` copies them."""
    return ops.reduce(detect.ensure().comm, tensor, reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad nested tensors along `dim` to the longest of all processes."""
    return ops.pad_across_processes(detect.ensure().comm, tensor, dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Return once every process has come here."""
    detect.ensure().comm.barrier()
