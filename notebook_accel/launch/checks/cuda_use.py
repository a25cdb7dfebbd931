"""Remembers what first initialised CUDA. It is small: where torch is there, it is imported with the package."""

from __future__ import annotations

import contextlib
import sys
import traceback


class FirstUse:
    """Remembers the stack of its first call. torch calls it when CUDA is initialised, which it must not prevent."""

    def __init__(self) -> None:
        self.stack: traceback.StackSummary | None = None

    def __call__(self) -> None:
        if self.stack is None:
            with contextlib.suppress(Exception):  # reading the lines asks the loaders of all modules in it
                self.stack = traceback.extract_stack()


first_use = FirstUse()


def record() -> None:
    """Let torch, where it is imported, call `first_use` when this process first initialises CUDA.

    Nothing is lost but a clause of a message where that fails, for example while torch is being imported.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with contextlib.suppress(Exception):
        is_queued = any(call is first_use for call, *_ in torch.cuda._queued_calls)
        if not is_queued and not torch.cuda.is_initialized():
            torch.cuda._lazy_call(first_use)
