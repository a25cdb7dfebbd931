"""Shapes and dtypes of nested tensors, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from .. import runtime
from ..nested import leaves_of, map_children, recursively_apply

TENSOR_TYPE_TO_INT: Final = {
    torch.float: 1,
    torch.double: 2,
    torch.half: 3,
    torch.bfloat16: 4,
    torch.uint8: 5,
    torch.int8: 6,
    torch.int16: 7,
    torch.int32: 8,
    torch.int64: 9,
    torch.bool: 10,
}
TENSOR_INT_TO_DTYPE: Final = {number: dtype for dtype, number in TENSOR_TYPE_TO_INT.items()}


@dataclass
class TensorInformation:
    """What it takes to make a tensor like another one."""

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: object) -> bool:
    """Return True for a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def is_torch_xpu_tensor(tensor: object) -> bool:
    """Return True for a tensor on an Intel GPU."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == "xpu"


def get_data_structure(data: Any) -> Any:
    """Return nested data with a `TensorInformation` in place of each tensor.

    Args:
        data: nested data.
    """
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """Return nested data with the list of its sizes in place of each tensor.

    Args:
        data: nested data.
    """
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Return nested data with a tensor without values in place of each `TensorInformation`.

    Args:
        data_structure: what `get_data_structure` returned.
    """
    if isinstance(data_structure, TensorInformation):  # first: it is a dataclass, which has children
        return torch.empty(data_structure.shape, dtype=data_structure.dtype)
    return map_children(initialize_tensors, data_structure)


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data, None where there is none.

    Args:
        data: nested data.
    """
    return next((leaf.device for leaf in leaves_of(data) if isinstance(leaf, torch.Tensor)), None)


@contextmanager
def GatheredParameters(  # noqa: N802
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Run the block with whole parameters where ZeRO 3 of DeepSpeed has sharded them; elsewhere they are whole.

    Args:
        params: parameters.
        modifier_rank: the rank that changes them in the block; None where none does.
        fwd_module: see DeepSpeed.
        enabled: False leaves them as they are.
    """
    installed = runtime.current()
    plugins = None if installed is None else installed.settings.deepspeed_plugins
    if plugins is None or plugins.selected.zero_stage != 3:
        yield
        return
    from deepspeed import zero

    with zero.GatheredParameters(params, modifier_rank=modifier_rank, fwd_module=fwd_module, enabled=enabled):
        yield
