"""Adds up the bytes of a model's tensors, modules and layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..choices import CustomDtype
from ..hooks.tensors import as_dtype, named_module_tensors

DtypeLike = str | torch.dtype | CustomDtype
Named = tuple[str, Any]
"""A module, a parameter or a buffer with its full name."""


_WIDTHS: Final = {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}


def dtype_byte_size(dtype: torch.dtype | CustomDtype) -> float:
    """Return the bytes of one value.

    Args:
        dtype: of torch, or a custom one, whose values may have less than a byte.

    Raises:
        TypeError: it is no dtype.
    """
    if isinstance(dtype, CustomDtype):
        return _WIDTHS[dtype]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype_byte_size takes a dtype of torch or a CustomDtype, not {dtype!r}")
    return dtype.itemsize


def _measure(dtype: DtypeLike | None) -> float | None:
    found = dtype if isinstance(dtype, CustomDtype) else as_dtype(dtype)
    return None if found is None else dtype_byte_size(found)


def is_within(name: str, module: str) -> bool:
    """Return True if a name is the module's own, or of something inside it.

    Args:
        name: a full name.
        module: the module's name, ``""`` for the model: everything is within it.
    """
    return module == "" or name == module or name.startswith(f"{module}.")


def find_whole_classes(model: nn.Module, given: str | Sequence[str] | None = None) -> list[str]:
    """Return the names of classes whose modules stay whole.

    Args:
        model: its modules name such classes in `_no_split_modules`.
        given: a name or names to use instead.
    """
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return sorted(names)


def compute_module_sizes(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of each module and tensor by name; shared tensors count where they come first.

    Args:
        model: on any device.
        dtype: that floating point tensors will have; those that are smaller already stay as they are.
        special_dtypes: other dtypes by the full name of a tensor.
        buffers_only: leave parameters out.
    """
    wanted = _measure(dtype)
    special = {name: _measure(item) for name, item in (special_dtypes or {}).items()}
    sizes: dict[str, Any] = defaultdict(int)  # whole numbers, but of formats of less than a byte
    tensors = model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True)
    for name, tensor in tensors:
        width: float = tensor.dtype.itemsize
        if (own := special.get(name)) is not None:
            width = own
        elif wanted is not None and tensor.dtype.is_floating_point:
            width = min(width, wanted)
        size = tensor.numel() * width
        sizes[""] += size
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return sizes


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
) -> int:
    """Return the bytes of all buffers.

    Args:
        model: see `compute_module_sizes`.
        dtype: likewise.
        special_dtypes: likewise.
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True).get("", 0)


def get_max_layer_size(
    modules: Sequence[Named],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Sequence[str] | None,
) -> tuple[int, list[str]]:
    """Return the size of the largest layer.

    A layer is a module without others inside, or one of a class that stays whole.

    Args:
        modules: modules and tensors with their names; modules are searched with all that is inside.
        module_sizes: of `compute_module_sizes`.
        no_split_module_classes: names of the classes that stay whole.

    Returns:
        Its bytes, and the names of all layers of that size.
    """
    whole = set(no_split_module_classes or ())
    largest, names = 0, list[str]()
    waiting = list(reversed(modules))
    while waiting:
        name, module = waiting.pop()
        children = [] if isinstance(module, torch.Tensor) else list(module.named_children())
        if children and type(module).__name__ not in whole:
            waiting += [(f"{name}.{key}" if name else key, child) for key, child in reversed(children)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the size of a model and of its largest layer.

    Args:
        model: on any device.

    Returns:
        The model's bytes, and for the largest layer its bytes and the names of all layers of that size.
    """
    sizes = compute_module_sizes(model)
    parts: list[Named] = [*model.named_parameters(recurse=False), *model.named_children()]
    parts += model.named_buffers(recurse=False)
    layers = get_max_layer_size(parts, sizes, find_whole_classes(model))
    return sizes[""], layers


def list_leaves(sizes: Mapping[str, int]) -> list[str]:
    """Return the names that have no other names within them.

    Args:
        sizes: bytes by name.
    """
    inner = {name.rpartition(".")[0] for name in sizes}
    return [name for name in sizes if name and name not in inner]
