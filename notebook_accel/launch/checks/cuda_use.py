"""Remembers what first initialised CUDA. It is small: where torch is there, it is imported with the package."""

from __future__ import annotations

import contextlib
import sys
import traceback


class FirstUse:
    """Remembers the stack of its first call. torch calls it when CUDA is initialised."""

    def __init__(self) -> None:
        self.stack: traceback.StackSummary | None = None

    def __call__(self) -> None:
        if self.stack is None:
            self.stack = traceback.extract_stack()


first_use = FirstUse()


def record() -> None:
    """Let torch, where it is imported, call `first_use` when this process first initialises CUDA."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_initialized():
        with contextlib.suppress(AttributeError):
            if all(call is not first_use for call, *_ in torch.cuda._queued_calls):
                torch.cuda._lazy_call(first_use)
