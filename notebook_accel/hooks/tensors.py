"""A module's own tensors by name, and how one of them gets another device, value or dtype."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from .. import devices, nested
from .offloaded_tensor import like_parameter

Device = int | str | torch.device
TiedMap = MutableMapping[int, dict[torch.device, torch.Tensor]]
"""Copies of shared weights, by address of the original and by device."""


def as_device(device: Device) -> torch.device:
    """Return a device of torch; a number is that accelerator of this machine, or a CUDA device where there is none."""
    if isinstance(device, torch.device):
        return device
    if isinstance(device, str):
        return torch.device(device)
    kind = devices.best().name
    return torch.device(kind if kind != "cpu" else "cuda", device)


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """Return True if both are the same device.

    Args:
        one: a device; without a number it is the first of its kind.
        other: a device, likewise.
    """
    if one.type != other.type:
        return False
    return one.type in ("cpu", "meta", "mps") or (one.index or 0) == (other.index or 0)


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's parameters, then its buffers, with their names.

    Args:
        module: whose tensors.
        include_buffers: False leaves buffers out.
        recurse: those of the modules inside too.
        remove_non_persistent: leave out buffers that are not in the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    transient = non_persistent_buffers(module, recurse) if remove_non_persistent else set()
    yield from (item for item in module.named_buffers(recurse=recurse) if item[0] not in transient)


def non_persistent_buffers(module: nn.Module, recurse: bool = False) -> set[str]:
    """Return the full names of buffers that are not in the state dict.

    Args:
        module: whose buffers.
        recurse: those of the modules inside too.
    """
    parts = module.named_modules() if recurse else [("", module)]
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in parts
        for name in part._non_persistent_buffers_set
    }


def find_owner(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor itself, and the tensor's name in it.

    Args:
        module: the tensor is in it or in a module inside.
        tensor_name: its full name.

    Raises:
        ValueError: there is no such tensor.
    """
    path, _, name = tensor_name.rpartition(".")
    owner = module
    for part in path.split(".") if path else ():
        found = getattr(owner, part, None)
        if not isinstance(found, nn.Module):
            raise ValueError(f"{type(module).__name__} has no module {path!r}: {part!r} is none")
        owner = found
    if name not in owner._parameters and name not in owner._buffers:
        raise ValueError(f"{type(owner).__name__} has no parameter and no buffer {name!r}")
    return owner, name


def put(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replace a parameter or buffer, without the checks of `setattr`.

    Args:
        owner: the module that holds it itself.
        name: its name there.
        tensor: the new one.
    """
    table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    table[name] = tensor


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedMap | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or a buffer on another device, with another value or dtype if given.

    Args:
        module: has the tensor, itself or in a module inside.
        tensor_name: its full name.
        device: where it goes; `meta` drops its values.
        value: its new values, needed where it has none (on the meta device).
        dtype: of the result, by default the tensor's own.
        fp16_statistics: scales of an 8-bit weight, set on it as `SCB`.
        tied_params_map: copies of shared weights so far, by address; this call adds its own.
        non_blocking: copy without waiting, where the device can.
        clear_cache: accepted; memory stays with torch's allocator, which uses it again.

    Raises:
        ValueError: there is no such tensor, or it has no values and gets none, or the shapes differ.
    """
    del clear_cache
    owner, name = find_owner(module, tensor_name)
    old = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    if old is None:
        raise ValueError(f"{tensor_name!r} of {type(owner).__name__} is None")
    target = as_device(device)
    wanted = as_dtype(dtype)
    if value is None and old.is_meta and target.type != "meta":
        raise ValueError(f"{tensor_name!r} is on the meta device: a value is needed to put it on {device}")
    if value is not None and value.shape != old.shape:
        raise ValueError(
            f"{tensor_name!r} of {type(owner).__name__} has shape {list(old.shape)}, the value {list(value.shape)}"
        )
    source = old if value is None else value
    address = None if source.is_meta else source.data_ptr()
    copies = tied_params_map.get(address) if tied_params_map is not None and address else None
    with torch.no_grad():
        if copies is not None and target in copies:
            made = copies[target]
        else:
            cast = wanted or (source.dtype if value is None else _own_dtype(old, value))
            made = source.to(device=target, dtype=cast, non_blocking=non_blocking)
    made = like_parameter(old, made)
    if copies is not None and target.type != "meta":
        copies.setdefault(target, made)
    if fp16_statistics is not None:
        setattr(made, "SCB", fp16_statistics.to(target))  # noqa: B010 - of bitsandbytes' own classes
    if isinstance(old, nn.Parameter) and old.grad is not None and made is not old and not made.is_meta:
        made.grad = old.grad.to(made.device)
    put(owner, name, made)


def _own_dtype(old: torch.Tensor, value: torch.Tensor) -> torch.dtype:
    """Return the dtype of the model; quantized values keep theirs."""
    return old.dtype if value.is_floating_point() or not old.is_floating_point() else value.dtype


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype of torch by its name too; ValueError for another word."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"dtype {dtype!r} is unknown, choose a dtype of torch such as 'float16' or 'bfloat16'"
        )
    return found


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor in nested data, None without one."""
    return next((leaf.device for leaf in nested.leaves_of(data) if isinstance(leaf, torch.Tensor)), None)
