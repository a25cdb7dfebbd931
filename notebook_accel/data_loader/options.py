"""What a data loader was made of: its options and its outermost sampler."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.data import DataLoader

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


def outer_sampler(dataloader: DataLoader[Any]) -> Any:
    """Return what the loader takes from its dataset by: the batch sampler, or the sampler where it has none."""
    return dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
