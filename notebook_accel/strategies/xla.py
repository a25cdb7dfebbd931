"""Training on devices of torch_xla, which run what was noted of a step as one compiled program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..combinations import refuse
from ..comm import xla
from ..precision import Precision
from ..runtime import Runtime
from .base import Bundle
from .single import SingleDevice


class XlaDevice(SingleDevice):
    """The whole model on the device; gradients are averaged over the processes before a step or when clipped.

    With SPMD there is one process, each device computes with its rows of the batch, and the compiler adds up their
    gradients. Buffers, such as those of batch norm, are each process's own; with SPMD they are of the whole batch.
    """

    def __init__(self, runtime: Runtime, precision: Precision) -> None:
        super().__init__(runtime, precision)
        self._averaged: set[int] = set()
        self._quiet = 0

    @property
    def wraps_steps(self) -> bool:
        return True

    def prepare(self, bundle: Bundle) -> Bundle:
        bundle = super().prepare(bundle)
        if self._several and not bundle.evaluation:
            for model, placed in zip(bundle.models, bundle.placements, strict=True):
                if placed and any(parameter.requires_grad for parameter in model.parameters()):
                    xla.broadcast_model(model)
        return bundle

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._forget()
        super().backward(loss, **kwargs)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._quiet or (self.runtime.gradient.xla_gradients_synced and not self._averaged):
            return  # steps are to be local, or the user's code has averaged the gradients and set the flag
        self._average(parameter for group in optimizer.param_groups for parameter in group["params"])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.runtime.gradient.xla_gradients_synced = False
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._averaged -= own
        xla.sync()

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return self._alone()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        return super().clip_grad_norm(self._ready_to_clip(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        super().clip_grad_value(self._ready_to_clip(parameters), clip_value)

    def joinable(self, model: Any) -> Any:
        raise refuse("xla, join")

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        state = super().state_dict(model)
        state.update(xla.to_cpu(dict(state)))
        return state

    @property
    def _several(self) -> bool:
        return self.runtime.topology.world_size > 1

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _forget(self) -> None:
        self._averaged.clear()
        self.runtime.gradient.xla_gradients_synced = False

    def _ready_to_clip(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # gradients that accumulate are not averaged, as on other devices
        if self.runtime.gradient.sync_gradients and not self._quiet:
            self._average(chosen)
            self.runtime.gradient.xla_gradients_synced = True
        return chosen

    def _average(self, parameters: Iterable[torch.Tensor]) -> None:
        due = {
            id(parameter): parameter
            for parameter in parameters
            if parameter.grad is not None and id(parameter) not in self._averaged
        }
        if self._several:
            gradients = [parameter.grad for parameter in due.values() if parameter.grad is not None]
            xla.average(gradients, self.runtime.topology.world_size)
        self._averaged.update(due)
