"""Mixed precision: runs a prepared model's forward under autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, Final

import torch

from . import devices, environ, fp8
from .choices import Choice
from .combinations import refuse
from .handlers import AutocastKwargs, GradScalerKwargs
from .loss_scaler import LossScaler
from .nested import convert_to_fp32


class PrecisionType(Choice):
    """Number format of a prepared model's forward."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


# fp8 is for the matrix products inside linear layers; everything else runs in bfloat16
PRECISIONS: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The dtype that operations compute in under autocast."""


def resolve(mixed_precision: str | None, device: torch.device) -> str:
    """Return the name of the precision in lower case.

    Args:
        mixed_precision: the argument; by default ACCELERATE_MIXED_PRECISION, else `no`.
        device: where models run.

    Raises:
        ValueError: the precision is unknown, or the device does not support it.
        ImportError: its library is not installed.
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
        _prepare_xla(mode)
    if mode == "bf16" and not devices.has_bf16(device):
        raise ValueError(f"mixed_precision 'bf16' is not supported by this {device.type} device, use 'fp16'")
    return mode


def _prepare_xla(mode: str) -> None:
    """Pass `downcast_bf16` on to torch_xla; ValueError if its devices do not support the precision."""
    if mode == "fp16":
        raise refuse("xla, fp16")
    if environ.flag("ACCELERATE_DOWNCAST_BF16"):
        if mode != "bf16":
            raise refuse("downcast, precision", f"{mode!r}")
        # torch_xla reads it with the first tensor, and then stores float32 as bfloat16
        environ.put({"XLA_DOWNCAST_BF16": "1"})


class Precision:
    """The precision of one accelerator.

    Args:
        mode: `no`, `bf16`, `fp16` or `fp8`.
        device: where models run.
        autocast: arguments of `torch.autocast`.
        scaling: arguments of the scaler for `fp16`.
        recipe: how `fp8` converts layers.
        is_external: a library that trains, such as DeepSpeed, casts models and scales losses itself.

    Attributes:
        handler: arguments of `torch.autocast`, for models that are prepared.
    """

    def __init__(
        self,
        mode: str,
        device: torch.device,
        *,
        autocast: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
        recipe: fp8.AORecipeKwargs | None = None,
        is_external: bool = False,
    ) -> None:
        self.mode = mode
        self.is_mixed = mode in PRECISIONS and not is_external
        self.scaler: LossScaler | None = None
        self.recipe = recipe
        self._device = device
        self.handler = autocast
        if mode == "fp16" and not is_external:
            self.scaler = LossScaler(device.type, **({} if scaling is None else scaling.to_kwargs()))
        if mode == "fp8" and recipe is None:
            self.recipe = fp8.AORecipeKwargs()

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context in which operations run in this precision.

        Args:
            handler: arguments of `torch.autocast`; None for its defaults.
        """
        return self.context(self.mode, self._device, handler)

    @staticmethod
    def context(
        mode: str, device: torch.device, handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which operations run in a precision.

        Args:
            mode: name of the precision.
            device: where operations run.
            handler: arguments of `torch.autocast`.
        """
        if mode not in PRECISIONS:
            return nullcontext()
        return torch.autocast(
            device.type, dtype=PRECISIONS[mode], **({} if handler is None else handler.to_kwargs())
        )

    def convert(self, model: torch.nn.Module, *, will_be_sharded: bool = False) -> None:
        """Replace the layers that compute in float8; other precisions than `fp8` replace none.

        Args:
            model: changed in place.
            will_be_sharded: FSDP will shard its weights.
        """
        if self.mode == "fp8" and self.recipe is not None:
            fp8.convert(model, self.recipe, will_be_sharded=will_be_sharded)

    def apply(self, model: torch.nn.Module) -> None:
        """Make the model's forward run in this precision and return float32; `no` changes nothing.

        Args:
            model: changed in place.
        """
        self.convert(model)
        self.wrap_forward(model)

    def wrap_forward(self, model: torch.nn.Module) -> None:
        """Do what `apply` does, for a model whose layers are converted already.

        Args:
            model: changed in place.
        """
        if self.is_mixed and "_original_forward" not in model.__dict__:
            forward = model.forward
            # the partial does not hold this object: copies of the model would copy its scaler
            context = functools.partial(self.context, self.mode, self._device, self.handler)
            vars(model).update(_original_forward=forward, forward=MixedForward(forward, context))


class MixedForward:
    """A forward that runs under autocast and returns float32; it has the signature of the model's own forward.

    Args:
        forward: the model's own.
        context: returns the context to run it in; None calls it directly.
    """

    def __init__(
        self, forward: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]] | None
    ) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._context = context

    def disable(self) -> None:
        """Call the model's own forward directly from now on."""
        self._context = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._context is None:
            return self._forward(*args, **kwargs)
        with self._context():
            outputs = self._forward(*args, **kwargs)
        return convert_to_fp32(outputs)

    def rebind(self, old: torch.nn.Module, new: torch.nn.Module) -> MixedForward:
        """Return the wrapper for a copy of the model.

        Args:
            old: the model.
            new: its copy, whose forward the result calls.
        """
        if getattr(self._forward, "__self__", None) is not old:
            return self
        return MixedForward(MethodType(self._forward.__func__, new), self._context)  # type: ignore[attr-defined]


def restore_forward(model: torch.nn.Module) -> None:
    """Undo `Precision.apply`.

    Args:
        model: changed in place.
    """
    if model.__dict__.pop("_original_forward", None) is not None:
        wrapper = model.__dict__.get("forward")
        inner = wrapper
        while inner is not None and not hasattr(inner, "_forward"):
            inner = getattr(inner, "__wrapped__", None)
        if isinstance(inner, MixedForward) and inner is not wrapper:  # somebody wrapped it later
            inner.disable()
            return
        model.__dict__.pop("forward", None)
        own = getattr(wrapper, "_forward", None)
        # a forward that was set on the instance is restored there
        if own is not None and getattr(own, "__func__", None) is not getattr(type(model), "forward", None):
            vars(model)["forward"] = own


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward whose float16 and bfloat16 outputs are converted to float32.

    Args:
        model_forward: the forward to call.
    """

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward
