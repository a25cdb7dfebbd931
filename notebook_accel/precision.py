"""Mixed precision: autocast around a prepared model's forward, and the scaler that float16 needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Final

import torch
from torch.amp.grad_scaler import OptState

from . import environ, fp8
from .choices import Choice
from .handlers import AutocastKwargs, GradScalerKwargs
from .nested import convert_to_fp32


class PrecisionType(Choice):
    """Number format of a prepared model's forward."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


# fp8 is for matrix products within linear layers; all around them runs in bfloat16
PRECISIONS: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""What operations compute in."""


def settle(mixed_precision: str | None, device: torch.device) -> str:
    """Return the precision asked for, by default that of ACCELERATE_MIXED_PRECISION, else `no`.

    ValueError if it is unknown or this device cannot do it, ImportError if its library is missing.
    """
    text = (
        mixed_precision if mixed_precision is not None else environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    )
    mode = str(text).lower()
    if mode not in PrecisionType:
        raise ValueError(f"mixed_precision {str(text)!r} is unknown, choose among no, bf16, fp16, fp8")
    if mode == "fp8":
        fp8.check(device)
    if device.type == "xla":
        _settle_xla(mode)
    if mode == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ValueError("mixed_precision 'bf16' is not supported by this GPU, use 'fp16'")
    return mode


def _settle_xla(mode: str) -> None:
    """Tell torch_xla of `downcast_bf16`; ValueError if its devices cannot do this precision."""
    if mode == "fp16":
        raise ValueError("mixed_precision 'fp16' is not supported by XLA devices, use 'bf16'")
    if environ.flag("ACCELERATE_DOWNCAST_BF16"):
        if mode != "bf16":
            raise ValueError(f"downcast_bf16 is for mixed_precision 'bf16', not {mode!r}: leave it out")
        environ.put(
            {"XLA_DOWNCAST_BF16": "1"}
        )  # read with the first tensor: float32 is bfloat16 on the device


class LossScaler(torch.amp.GradScaler):
    """A scaler that adapts its scale with the next loss, when all optimizers have stepped that share the last one.

    An update between two of them would let the second divide its gradients again, or by another scale than its
    loss was multiplied with.
    """

    def __init__(self, device: str, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._update_is_due = False

    def request_update(self) -> None:
        """Let the next loss start with `update`."""
        self._update_is_due = True

    def _settle(self) -> None:
        if self._update_is_due:
            self.update()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to what the last steps found, or set it."""
        self._update_is_due = False
        super().update(new_scale)

    def scale(self, outputs: Any) -> Any:
        """Return the outputs multiplied with the scale."""
        self._settle()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, unless that was done for this step."""
        if self._stage(optimizer) is OptState.STEPPED:
            self._settle()
        if self._stage(optimizer) is not OptState.UNSCALED:
            super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is infinite or undefined."""
        if self._stage(optimizer) is OptState.STEPPED:
            self._settle()
        return super().step(optimizer, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and what it adapts by."""
        self._settle()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return super().__getstate__()

    def found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer's last gradients held an infinite or undefined value."""
        if not self.is_enabled():
            return False
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(value.item()) for value in found.values())

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        if not self.is_enabled():
            return OptState.READY
        # torch keeps this for every optimizer, and makes the entry when it is first asked for
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage


class Precision:
    """The precision of one accelerator.

    Args:
        mode: `no`, `bf16`, `fp16` or `fp8`.
        device: where models run.
        autocast: arguments for `torch.autocast`.
        scaling: arguments for the scaler that `fp16` makes.
        recipe: how `fp8` converts layers.
        is_library_s: a library that trains converts models and scales losses itself.
    """

    def __init__(
        self,
        mode: str,
        device: torch.device,
        *,
        autocast: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
        recipe: fp8.AORecipeKwargs | None = None,
        is_library_s: bool = False,
    ) -> None:
        self.mode = mode
        self.is_mixed = mode in PRECISIONS and not is_library_s
        self.scaler: torch.amp.GradScaler | None = None
        self.recipe = recipe
        self._device = device
        self._autocast = autocast
        if mode == "fp16" and not is_library_s:
            self.scaler = LossScaler(device.type, **({} if scaling is None else scaling.to_kwargs()))
        if mode == "fp8" and recipe is None:
            self.recipe = fp8.AORecipeKwargs()

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context in which operations run in this precision."""
        return self.context(self.mode, self._device, self._autocast if handler is None else handler)

    @staticmethod
    def context(
        mode: str, device: torch.device, handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which operations on the device run in the precision of this name."""
        if mode not in PRECISIONS:
            return nullcontext()
        return torch.autocast(
            device.type, dtype=PRECISIONS[mode], **({} if handler is None else handler.to_kwargs())
        )

    def apply(self, model: torch.nn.Module) -> None:
        """Let the model's forward run in this precision and return float32; `no` leaves the model alone."""
        if self.recipe is not None:
            fp8.convert(model, self.recipe)
        if self.is_mixed and "_original_forward" not in model.__dict__:
            forward = model.forward
            # not this object: copies of the model would copy its scaler
            context = functools.partial(self.context, self.mode, self._device, self._autocast)
            vars(model).update(_original_forward=forward, forward=MixedForward(forward, context))


class MixedForward:
    """A forward within a context, autocast, whose outputs are float32; its signature is that of the model's own."""

    def __init__(
        self, forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]] | None
    ) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._context = context

    def disable(self) -> None:
        """Become the forward inside, for whom something else calls this one."""
        self._context = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._context is None:
            return self._forward(*args, **kwargs)
        with self._context():
            outputs = self._forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    def rebound(self, old: torch.nn.Module, new: torch.nn.Module) -> MixedForward:
        """Return the same for a copy of the model, whose own forward it then calls."""
        if getattr(self._forward, "__self__", None) is not old:
            return self
        return MixedForward(MethodType(self._forward.__func__, new), self._context)  # type: ignore[attr-defined]


def restore_forward(model: torch.nn.Module) -> None:
    """Undo `Precision.apply`."""
    if model.__dict__.pop("_original_forward", None) is not None:
        wrapper = model.__dict__.get("forward")
        inner = wrapper
        while inner is not None and not hasattr(inner, "_forward"):
            inner = getattr(inner, "__wrapped__", None)
        if isinstance(inner, MixedForward) and inner is not wrapper:  # a hook was put around it since
            inner.disable()
            return
        model.__dict__.pop("forward", None)
        own = getattr(wrapper, "_forward", None)
        # a forward that was itself set on the instance goes back there
        if own is not None and getattr(own, "__func__", None) is not type(model).forward:
            vars(model)["forward"] = own


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `model_forward` and turns float16 and bfloat16 outputs into float32."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
