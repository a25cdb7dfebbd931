"""How much memory each device may give to a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from .. import devices
from ..caller import warn
from . import sizes
from .sizes import DtypeLike

Limits = Mapping[int | str, float | str]
_NAMED: Final = ("mps", "cpu", "disk")
_SIZE: Final = re.compile(r"\s*(\d*\.?\d*(?:E[+-]?\d+)?)\s*([KMGT])(I?)(B)\s*", re.IGNORECASE)
_POWERS: Final = {"K": 1, "M": 2, "G": 3, "T": 4}
_SHARE: Final = 0.9  # of what is free on a GPU; kernels' work space and fragments need the rest


def convert_file_size_to_int(size: float | str) -> int:
    """Return a size in bytes.

    Args:
        size: bytes, of which a fraction is left out, or a text such as `500MB` or `10GiB`. A small b in `Gb`, but not
            in `Gib`, stands for bits, as in Accelerate.

    Raises:
        ValueError: it is neither, or negative.
    """
    if isinstance(size, (int, float)) and not isinstance(size, bool) and math.isfinite(size):
        if size < 0:
            raise ValueError(f"size {size!r} is negative")
        return int(size)
    match = _SIZE.fullmatch(str(size))
    try:
        number = float(match[1]) if match is not None else math.nan
    except ValueError:
        number = math.nan
    if match is None or not math.isfinite(number):
        raise ValueError(
            f"size {size!r} is neither a number of bytes nor a text such as '500MB', '10GB' or '2GiB'"
        )
    found = int(number * (1024 if match[3] else 1000) ** _POWERS[match[2].upper()])
    return found // 8 if match[4] == "b" and not match[3] else found


def get_max_memory(max_memory: Limits | None = None) -> dict[int | str, int]:
    """Return bytes by device: GPUs by number in order, then `mps`, `cpu` and `disk`.

    Args:
        max_memory: bytes or texts such as `10GiB`, for all devices that may be used. The default is nine tenths of
            what is free on each GPU, and what is available on the CPU.

    Raises:
        ValueError: it is no mapping, or names a device or a size that is not legal.
    """
    if max_memory is None:
        found: dict[int | str, int] = {number: int(free * _SHARE) for number, free in _free_on_gpus().items()}
        if not found and devices.best(use_cpu=False) is devices.MPS:
            found["mps"] = torch.mps.recommended_max_memory()
        import psutil  # takes 8 ms, and not all models need it

        found["cpu"] = psutil.virtual_memory().available
        return found
    if not isinstance(max_memory, Mapping):
        raise ValueError(
            f"max_memory says bytes for each device, such as {{0: '10GiB', 'cpu': '30GiB'}}, {max_memory!r} does not"
        )
    limits = {name: convert_file_size_to_int(size) for name, size in max_memory.items()}
    for name in limits:
        if (not isinstance(name, int) or isinstance(name, bool) or name < 0) and name not in _NAMED:
            raise ValueError(
                f"max_memory names device {name!r}: choose numbers of GPUs, 'mps', 'cpu' and 'disk'"
            )
    numbers = sorted(name for name in limits if isinstance(name, int))
    kind = devices.best(use_cpu=False)
    count = kind.counter() if kind.indexed else 0
    # without any GPU it is a plan for another machine
    if count and (missing := [number for number in numbers if number >= count]):
        warn(f"max_memory names GPU {missing}, and this machine has {count}")
    order: list[int | str] = [*numbers, *(name for name in _NAMED if name in limits)]
    return {name: limits[name] for name in order}


def _free_on_gpus() -> dict[int, int]:
    kind = devices.best(use_cpu=False)
    if not kind.indexed:
        return {}
    runtime: Any = getattr(torch, kind.name)
    return {number: runtime.mem_get_info(number)[0] for number in range(kind.counter())}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Limits | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Return limits for `infer_auto_device_map` that give each GPU about the same amount of the model.

    The last GPU keeps its limit, since what does not fit before it goes there. Without several GPUs the limits stay.

    Args:
        model: on any device.
        max_memory: see `get_max_memory`.
        no_split_module_classes: names of classes whose modules stay whole, by default the model's own.
        dtype: that the weights will have.
        special_dtypes: other dtypes by name.
        low_zero: leave the first GPU as empty as possible, for what `generate` keeps there.

    Returns:
        Bytes by device.
    """
    limits = get_max_memory(max_memory)
    gpus = [name for name, size in limits.items() if isinstance(name, int) and size > 0]
    if not gpus:
        return limits
    if len(gpus) == 1 and not low_zero:
        return limits
    by_name = sizes.compute_module_sizes(model, dtype, special_dtypes)
    share = by_name[""] // (len(gpus) - 1 if low_zero and len(gpus) > 1 else len(gpus))
    share += int(
        1.25 * max(_largest_whole(model, by_name, no_split_module_classes), _mean_module_size(by_name))
    )
    for number in gpus[:-1]:
        if not (low_zero and number == gpus[0]):
            limits[number] = min(limits[number], share)
    if low_zero:
        others = sum(limits[number] for number in gpus[1:])
        limits[gpus[0]] = min(limits[gpus[0]], max(0, by_name[""] - others))
    return limits


def _largest_whole(model: nn.Module, by_name: Mapping[str, int], given: str | Sequence[str] | None) -> int:
    """Return the bytes of the largest first module of each class that stays whole."""
    whole = sizes.find_whole_classes(model, given)
    first: dict[str, int] = {}
    for name, part in model.named_modules():
        if name and (kind := type(part).__name__) in whole:
            first.setdefault(kind, by_name.get(name, 0))
    return max(first.values(), default=0)


def _mean_module_size(by_name: Mapping[str, int]) -> int:
    """Return the mean bytes of the modules that hold tensors and no modules."""
    tensors = set(sizes.list_leaves(by_name))
    modules = {name: size for name, size in by_name.items() if name not in tensors}
    innermost = sizes.list_leaves(modules)
    return sum(modules[name] for name in innermost) // max(len(innermost), 1)
