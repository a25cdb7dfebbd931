"""Objects on their way to a worker and back: cloudpickle, with tensors and arrays outside the pickle.

A notebook's functions and classes have no importable module, so they travel by value. A class that the receiver
has under the same name in `__main__` is that class again: `except MyError` in a cell works for a class defined
in a cell.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch

from ..events import Buffer


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """A pickle and its out-of-band buffers."""

    pickled: bytes
    buffers: list[Buffer]


def pack(value: object, *, to_cpu: bool = False) -> Parcel:
    """Pickle a value; memory of tensors and arrays is not copied but referred to.

    Args:
        to_cpu: tensors arrive on the CPU, detached from their graph; else on the device that they are on.
    """
    buffers: list[Buffer] = []
    file = io.BytesIO()
    _Packer(file, buffers, to_cpu).dump(value)
    return Parcel(pickled=file.getvalue(), buffers=buffers)


def unpack(pickled: Buffer, buffers: list[Buffer]) -> Any:
    """Make the value again; its tensors and arrays use the buffers' memory."""
    return pickle.loads(pickled, buffers=buffers)


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, buffers: list[Buffer], to_cpu: bool) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self._to_cpu = to_cpu
        self._storages: dict[int, torch.UntypedStorage] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _plain(obj):
            return self._reduce_tensor(obj)
        if type(obj) is torch.UntypedStorage:
            data: Any = torch.empty(0, dtype=torch.uint8).set_(obj).numpy()
            return _storage_from, (pickle.PickleBuffer(data),)
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and obj.__module__ == "__main__" and isinstance(reduced, tuple):
            return _prefer_own(obj, reduced)
        return reduced

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        device = None if self._to_cpu or tensor.device.type == "cpu" else str(tensor.device)
        requires_grad = tensor.requires_grad and (tensor.is_leaf or not self._to_cpu)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = storage.cpu() if tensor.device.type != "cpu" else storage
        layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        flags = (requires_grad, tensor.is_conj(), tensor.is_neg())
        return _tensor_from, (self._storages[key], *layout, *flags, device)


def _prefer_own(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Change how cloudpickle makes a class: the receiver's class of that name in `__main__` comes first."""
    make, args, state, items, pairs, set_state = reduced + (None,) * (6 - len(reduced))
    setter = functools.partial(_set_class_state, set_state)
    return _class_from, (cls.__qualname__, make, args), state, items, pairs, setter


def _class_from(qualname: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    return _own_class(qualname) or make(*args)


def _set_class_state(set_state: Callable[[type, Any], None], cls: type, state: Any) -> None:
    if _own_class(cls.__qualname__) is not cls:
        set_state(cls, state)


def _own_class(qualname: str) -> type | None:
    found: Any = sys.modules.get("__main__")
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type not in ("meta", "xla")
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.__dict__
    )


def _tensor_from(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    conj: bool,
    neg: bool,
    device: str | None,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    tensor = tensor.conj() if conj else tensor
    tensor = torch._neg_view(tensor) if neg else tensor
    if device is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_(requires_grad)


def _storage_from(data: Any) -> torch.UntypedStorage:
    view = memoryview(data)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
