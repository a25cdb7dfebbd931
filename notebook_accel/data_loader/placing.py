"""Puts batches on a device, and leaves alone what is there."""

from __future__ import annotations

from typing import Any, Final

import torch

from ..nested import send_to_device

_NEVER_MOVED: Final = frozenset((str, bytes, bool, int, float, type(None)))


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
