"""What ranks with different numbers of batches agree about, so that their collectives stay the same ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from ..runtime import GradientFlags


@contextmanager
def step_together(
    models: Sequence[Joinable], flags: GradientFlags, on_earlier: Callable[[], None]
) -> Iterator[list[Joinable]]:
    """Let all ranks step where one of them does, in a block of `torch.distributed.algorithms.Join`.

    The last batch of a rank's loader is a step, and other ranks that accumulate gradients may be between two steps
    then. Without an agreement their collectives would differ, and all would wait for ever. They ask each other before
    each forward of the first model, and wait for the slowest of them there.

    Args:
        models: what joins.
        flags: of gradient accumulation; its `sync_gradients` turns true on ranks that step earlier than they meant to.
        on_earlier: called on these.

    Yields:
        What is to join.
    """
    wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
    if not wrapped or len(wrapped) < len(models):
        yield list(models)
        return
    agreement = _Agreement(wrapped, flags, on_earlier)
    agreement.begin()
    try:
        yield [agreement, *models]
    finally:
        agreement.end()


class _Agreement(Joinable):
    """Joins before the models, and asks all ranks before each forward of the first one."""

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        flags: GradientFlags,
        on_earlier: Callable[[], None],
    ) -> None:
        super().__init__()
        self._models = models
        self._flags = flags
        self._on_earlier = on_earlier

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Ended(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device(self._models[0].join_device)

    @property
    def join_process_group(self) -> Any:
        return self._models[0].join_process_group

    def begin(self) -> None:
        """Ask before each forward of the first model, also of one that is called by the name of `forward`."""
        model = self._models[0]
        forward: Any = model.forward
        before_forward = self._before_forward
        if "torch._dynamo" in sys.modules:  # a compiled model breaks its graph here without a word
            before_forward = torch.compiler.disable(before_forward)

        def ask_and_forward(*args: Any, **kwargs: Any) -> Any:
            before_forward()
            return forward(*args, **kwargs)

        vars(model)["forward"] = ask_and_forward

    def end(self) -> None:
        vars(self._models[0]).pop("forward", None)

    def _before_forward(self) -> None:
        Join.notify_join_context(self)  # the first that joins does this
        wants = self._models[0].require_backward_grad_sync and self._flags.sync_gradients
        if not self.ask(wants) or wants:
            return
        for model in self._models:
            model.require_backward_grad_sync = True  # what `no_sync` has set restores itself
        self._flags.sync_gradients = True
        self._on_earlier()

    def ask(self, wants: bool) -> bool:
        """Return whether a rank wants to step."""
        wanted = torch.full((1,), float(wants), dtype=torch.float32, device=self.join_device)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX, group=self.join_process_group)
        return bool(wanted.item())


class _Ended(JoinHook):
    """What a rank without further batches does for one batch of the others."""

    def __init__(self, agreement: _Agreement) -> None:
        self._agreement = agreement

    def main_hook(self) -> None:
        self._agreement.ask(False)
