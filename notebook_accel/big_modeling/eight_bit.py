"""Linear layers with 8 bits a weight, whose weights may be elsewhere between forwards; bitsandbytes computes."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import nn

from .. import probes

SCALES: Final = "SCB"
"""The scales of a weight's rows, by the name that they have in bitsandbytes' state dicts."""
TENSORS: Final = ("weight", SCALES)
"""What `quantize` returns, by the names in a layer."""


class Linear8bit(nn.Module):
    """A linear layer for inference with weights in int8; it has no values until a checkpoint is loaded.

    It computes what bitsandbytes' `Linear8bitLt` computes, and its state dict has the same names. That layer keeps
    values beside its parameters, where neither a device map nor a hook finds them.

    Args:
        in_features: elements of an input.
        out_features: elements of an output.
        bias: dtype of the bias, None without one.
        threshold: input columns with a larger value are multiplied in full precision.

    Attributes:
        weight: int8, of shape [out_features, in_features].
        SCB: float32, of shape [out_features]: the largest absolute value of each row, which 127 stands for.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: torch.dtype | None, threshold: float
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.threshold = in_features, out_features, threshold
        self.weight = _parameter((out_features, in_features), torch.int8)
        self.SCB = _parameter((out_features,), torch.float32)
        self.bias = None if bias is None else _parameter((out_features,), bias)

    def extra_repr(self) -> str:
        """Return the sizes, for `print`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product.

        Args:
            x: of shape [..., in_features].
        """
        library = importlib.import_module("bitsandbytes")
        state = library.MatmulLtState()
        state.threshold, state.has_fp16_weights = self.threshold, False
        state.use_pool, state.is_training = self.threshold > 0, self.training
        state.CB, state.SCB = self.weight.data, self.SCB.data
        bias = None if self.bias is None else self.bias.to(x.dtype)
        made: torch.Tensor = library.matmul(x, self.weight, bias=bias, state=state)
        return made


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight in int8 and the scales of its rows, as LLM.int8() has them.

    Args:
        weight: float16, of shape [out_features, in_features].
    """
    functional = importlib.import_module("bitsandbytes.functional")
    values, scales, _ = functional.int8_vectorwise_quant(weight)
    return values, scales


def is_scales(owner: nn.Module, key: str) -> bool:
    """Return True for the scales of an 8-bit layer, which come from quantizing its weight.

    Args:
        owner: the module that has the tensor.
        key: the tensor's name in it.
    """
    return isinstance(owner, Linear8bit) and key == SCALES


def replace_layers(model: nn.Module) -> None:
    """Replace bitsandbytes' 8-bit layers that have no values yet by `Linear8bit`.

    Args:
        model: changed in place.

    Raises:
        ValueError: it has no 8-bit layer without values.
    """
    kind: Any = ()
    if probes.is_available("bitsandbytes"):
        kind = importlib.import_module("bitsandbytes.nn").Linear8bitLt
    for name, part in list(model.named_modules()):
        if isinstance(part, kind) and name and part.weight.is_meta:
            bias = None if part.bias is None else part.bias.dtype
            made = Linear8bit(part.in_features, part.out_features, bias, part.state.threshold)
            model.set_submodule(name, made.train(part.training))
    if not any(isinstance(part, Linear8bit) for part in model.modules()):
        raise ValueError(
            f"offload_8bit_bnb=True: {type(model).__name__} has no 8-bit layer of bitsandbytes on the meta device; "
            "load_and_quantize_model makes them, and loads and offloads the weights"
        )
