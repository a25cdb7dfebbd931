"""Weights that are stored in one dtype and compute in another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from .base import ModelHook, add_hook_to_module, outside_graphs


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one dtype and computes in another: for inference that saves memory.

    Args:
        storage_dtype: of the weights between forwards, such as `torch.float8_e4m3fn`.
        compute_dtype: of the weights in the forward, and after the hook is removed.
        non_blocking: copy without waiting, where the device can.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        for name, dtype in (("storage_dtype", storage_dtype), ("compute_dtype", compute_dtype)):
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"{name} is a floating point dtype of torch, not {dtype!r}")
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return self._cast(module, self.storage_dtype)

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._cast(module, self.compute_dtype)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._cast(module, self.storage_dtype)
        return output

    def after_error(self, module: nn.Module, error: BaseException) -> None:
        self._cast(module, self.storage_dtype)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return self._cast(module, self.compute_dtype)

    @outside_graphs
    def _cast(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        return module.to(dtype=dtype, non_blocking=self.non_blocking)


_CASTABLE: Final = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Sequence[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Give every linear and convolution layer a `LayerwiseCastingHook`; other layers keep their dtype.

    Args:
        module: the model, or one layer.
        storage_dtype: of the layers' weights between forwards.
        compute_dtype: of the layers' weights in the forward.
        skip_modules_pattern: regular expressions; a module whose name matches one is left out with all inside it.
        skip_modules_classes: modules of these classes are left out with all inside them.
        non_blocking: copy without waiting, where the device can.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    compiled = [re.compile(pattern) for pattern in patterns]
    skipped = tuple(skip_modules_classes or ())
    LayerwiseCastingHook(
        storage_dtype, compute_dtype, non_blocking
    )  # wrong dtypes raise before a layer changes

    def attach(part: nn.Module, name: str) -> None:
        if isinstance(part, skipped) or any(pattern.search(name) for pattern in compiled):
            return
        if isinstance(part, _CASTABLE):
            add_hook_to_module(
                part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True
            )
            return
        for child_name, child in part.named_children():
            attach(child, f"{name}.{child_name}" if name else child_name)

    attach(module, "")
