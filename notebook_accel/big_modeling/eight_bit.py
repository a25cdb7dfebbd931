"""Linear layers with 8 bits a weight, whose weights may be elsewhere between forwards; bitsandbytes computes."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from .. import probes

SCALES: Final = "SCB"
"""The scales of a weight's rows, by the name that they have in bitsandbytes' state dicts."""
TENSORS: Final = ("weight", SCALES)
"""What `quantize` returns, by the names in a layer."""
_FORMAT: Final = "weight_format"


class Linear8bit(nn.Module):
    """A linear layer for inference with weights in int8; it has no values until a checkpoint is loaded.

    It computes what bitsandbytes' `Linear8bitLt` computes. That layer keeps values beside its parameters, where neither
    a device map nor a hook finds them. Its state dict has the same names, and one more: see `list_formats`.

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


def list_formats(model: nn.Module) -> list[str]:
    """Return the names under which bitsandbytes saves how the weights of 8-bit layers are laid out.

    No tensor of the model has such a name: the only layout is torch's, by rows.

    Args:
        model: with `Linear8bit` layers.
    """
    return [
        f"{name}.{_FORMAT}" if name else _FORMAT
        for part, names in list_names(model).items()
        if isinstance(part, Linear8bit)
        for name in names
    ]


def list_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return each module of a model with all its names; a shared one has several.

    Args:
        model: with the modules.
    """
    found: dict[nn.Module, list[str]] = {}
    for name, part in model.named_modules(remove_duplicate=False):
        found.setdefault(part, []).append(name)
    return found


@contextlib.contextmanager
def swap_layers(model: nn.Module, swaps: Mapping[nn.Module, nn.Module]) -> Iterator[None]:
    """Put new layers in the places of others, under all their names; a block that raises puts the old ones back.

    Args:
        model: changed in place.
        swaps: the new layer for each old one.
    """
    places = [(name, part) for part, names in list_names(model).items() if part in swaps for name in names]
    for name, old in places:
        model.set_submodule(name, swaps[old])
    try:
        yield
    except BaseException:
        for name, old in places:
            model.set_submodule(name, old)
        raise


@contextlib.contextmanager
def replace_layers(model: nn.Module) -> Iterator[None]:
    """Replace bitsandbytes' 8-bit layers that have no values yet by `Linear8bit`; see `swap_layers`.

    Args:
        model: changed in place.

    Raises:
        ValueError: it has no 8-bit layer without values.
    """
    kind: Any = ()
    if probes.is_available("bitsandbytes"):
        kind = importlib.import_module("bitsandbytes.nn").Linear8bitLt
    swaps: dict[nn.Module, nn.Module] = {}
    for part, names in list_names(model).items():
        if isinstance(part, kind) and "" not in names and part.weight.is_meta:
            bias = None if part.bias is None else part.bias.dtype
            made = Linear8bit(part.in_features, part.out_features, bias, part.state.threshold)
            swaps[part] = made.train(part.training)
    if not swaps and not any(isinstance(part, Linear8bit) for part in model.modules()):
        raise ValueError(
            f"offload_8bit_bnb=True: {type(model).__name__} has no 8-bit layer of bitsandbytes on the meta device; "
            "load_and_quantize_model makes them, and loads and offloads the weights"
        )
    with swap_layers(model, swaps):
        yield
