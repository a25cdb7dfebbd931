"""The handlers of an accelerator, which libraries read, and set before they prepare models."""

from __future__ import annotations

from typing import Any

from ..fp8 import AORecipeKwargs
from ..handlers import AutocastKwargs, DistributedDataParallelKwargs
from .base import Shared


class HandlerPart(Shared):
    """What `kwargs_handlers` had, under Accelerate's names; None for what it did not have."""

    fp8_recipe_handler = None
    """None: there is no such recipe for torchao, the only library here that computes in float8."""
    te_recipe_handler = None
    """None, as `fp8_recipe_handler`."""
    msamp_recipe_handler = None
    """None, as `fp8_recipe_handler`."""
    delayed_fp8_autocast = False
    """False: torchao needs no context."""

    @property
    def ddp_handler(self) -> DistributedDataParallelKwargs | None:
        """Options of DistributedDataParallel for models that are prepared from now on."""
        return self._ddp_handler

    @ddp_handler.setter
    def ddp_handler(self, handler: DistributedDataParallelKwargs | None) -> None:
        _check("ddp_handler", handler, DistributedDataParallelKwargs)
        self._ddp_handler = handler

    @property
    def autocast_handler(self) -> AutocastKwargs | None:
        """Arguments of `torch.autocast` for `autocast`, and for models that are prepared from now on."""
        return self._autocast_handler

    @autocast_handler.setter
    def autocast_handler(self, handler: AutocastKwargs | None) -> None:
        _check("autocast_handler", handler, AutocastKwargs)
        self._autocast_handler = handler

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """How torchao converts models that are prepared from now on; None unless the precision is `fp8`."""
        return self._recipe

    @ao_recipe_handler.setter
    def ao_recipe_handler(self, handler: AORecipeKwargs | None) -> None:
        _check("ao_recipe_handler", handler, AORecipeKwargs)
        self._recipe = handler

    @property
    def fp8_enabled(self) -> bool:
        """True if the precision is `fp8`."""
        return self._precision.mode == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """True if there is an `ao_recipe_handler`."""
        return self._recipe is not None

    @property
    def has_lomo_optimizer(self) -> bool:
        """True if an optimizer was prepared that changes weights in the backward pass."""
        return any(optimizer.steps_in_backward for optimizer in self._optimizers)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return the loader: no sequences are split by DeepSpeed.

        Args:
            dl: a prepared loader.
            model: a prepared model.
        """
        return dl


def _check(name: str, handler: Any, kind: type) -> None:
    if handler is not None and not isinstance(handler, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, not {handler!r}")
