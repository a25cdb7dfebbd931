"""Mixed precision: autocast around a prepared model's forward, and the scaler that float16 needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch

from . import environ
from .choices import Choice
from .handlers import AutocastKwargs, GradScalerKwargs
from .nested import convert_to_fp32


class PrecisionType(Choice):
    """Number format of a prepared model's forward."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


def settle(mixed_precision: str | None, device: torch.device) -> str:
    """Return the precision asked for, by default that of ACCELERATE_MIXED_PRECISION, else `no`.

    ValueError if it is unknown or this device cannot do it.
    """
    text = (
        mixed_precision if mixed_precision is not None else environ.get("ACCELERATE_MIXED_PRECISION") or "no"
    )
    mode = str(text).lower()
    if mode not in PrecisionType:
        raise ValueError(f"mixed_precision {str(text)!r} is unknown, choose among no, bf16, fp16")
    if mode == "fp8":
        raise ValueError("mixed_precision 'fp8' is not supported, choose among no, bf16, fp16")
    if mode == "fp16" and device.type == "cpu":
        raise ValueError(
            "mixed_precision 'fp16' needs a GPU; on a CPU use 'bf16', which needs no loss scaling"
        )
    if mode == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ValueError("mixed_precision 'bf16' is not supported by this GPU, use 'fp16'")
    return mode


class Precision:
    """The precision of one accelerator.

    Args:
        mode: `no`, `bf16` or `fp16`.
        device: where models run.
        autocast: arguments for `torch.autocast`.
        scaling: arguments for the scaler that `fp16` makes.
    """

    def __init__(
        self,
        mode: str,
        device: torch.device,
        *,
        autocast: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
    ) -> None:
        self.mode = mode
        self.is_mixed = mode in _DTYPES
        self.scaler: torch.amp.GradScaler | None = None
        self._device_type = device.type
        self._options = {} if autocast is None else autocast.to_kwargs()
        if mode == "fp16":
            self.scaler = torch.amp.GradScaler(
                device.type, **({} if scaling is None else scaling.to_kwargs())
            )

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context in which operations run in this precision."""
        if not self.is_mixed:
            return nullcontext()
        options = self._options if handler is None else handler.to_kwargs()
        return torch.autocast(self._device_type, dtype=_DTYPES[self.mode], **options)

    def apply(self, model: torch.nn.Module) -> None:
        """Let the model's forward run in this precision and return float32; `no` leaves the model alone."""
        if self.is_mixed and "_original_forward" not in model.__dict__:
            forward = model.forward
            vars(model).update(_original_forward=forward, forward=MixedForward(forward, self))


class MixedForward:
    """A forward under autocast whose outputs are float32; its signature is that of the model's own."""

    def __init__(self, forward: Callable[..., Any], precision: Precision) -> None:
        functools.update_wrapper(self, forward)
        self._forward = forward
        self._precision: Precision | None = precision

    def disable(self) -> None:
        """Become the forward inside, for whom something else calls this one."""
        self._precision = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._precision is None:
            return self._forward(*args, **kwargs)
        with self._precision.autocast():
            outputs = self._forward(*args, **kwargs)
        return convert_to_fp32(outputs)


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
