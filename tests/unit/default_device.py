"""A default device of torch for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def make_default(device: str) -> Iterator[None]:
    """Let torch make tensors on a device, and afterwards as if there had been no default.

    After `torch.set_default_device(None)`, `torch.get_default_device` raises, in torch before 2.10.
    """
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        context: Any = torch._GLOBAL_DEVICE_CONTEXT
        if getattr(context, "device_context", True) is None:
            del context.device_context
