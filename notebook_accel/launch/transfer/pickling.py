"""Objects on their way to a worker and back: cloudpickle, with tensors and arrays outside the pickle.

A notebook's functions and classes have no importable module, so they travel by value. A class of `__main__` becomes the
receiver's own class of that name where there is one: so `except MyError` in a cell catches an error of a worker.
"""

from __future__ import annotations

import copy
import functools
import importlib
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader

from ...events import Buffer
from .left_behind import LeftBehind, describe, is_accelerator, is_their_state, join_state
from .pickled import Pickled
from .sharing import Descriptor, Sharing


def pack(
    value: object,
    *,
    to_cpu: bool = False,
    in_band: bool = False,
    leaves_run: bool = True,
    share: bool = False,
) -> Pickled:
    """Pickle a value; memory of tensors and arrays is not copied but referred to.

    Args:
        value: any object.
        to_cpu: tensors arrive on the CPU, detached from their graph; else on the device that they are on.
        in_band: copy the memory into the pickle.
        leaves_run: accelerators become stand-ins, see `left_behind`.
        share: memory that is meant to be shared travels by descriptors or by its name; else it is copied.

    Returns:
        The pickle, with its buffers unless `in_band`, and with the descriptors, which who calls has to close.

    Raises:
        Exception: the value, or a part of it, does not pickle.
    """
    buffers: list[Buffer] = []
    file = io.BytesIO()
    kind = _SharingPacker if share else _Packer
    packer = kind(file, None if in_band else buffers, to_cpu, leaves_run)
    try:
        packer.dump(value)
    except BaseException:
        for fd in packer.sharing.fds:
            os.close(fd)
        raise
    return Pickled(data=file.getvalue(), buffers=buffers, shared=packer.sharing.fds)


def unpack(data: Buffer, buffers: list[Buffer], shared: Sequence[int] = ()) -> Any:
    """Make a value again.

    Args:
        data: its pickle.
        buffers: those of the pickle; tensors and arrays of the value use their memory.
        shared: the descriptors of its shared memory; the value owns them.

    Returns:
        The value.
    """
    return _Unpacker(data, buffers, shared).load() if shared else pickle.loads(data, buffers=buffers)


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: Buffer, buffers: list[Buffer], shared: Sequence[int]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self._shared = shared

    def persistent_load(self, pid: int) -> Descriptor:
        return Descriptor(self._shared[pid])


class Names:
    """In a pickle this becomes a dict of the classes and functions of `__main__` that came before it, by their names.

    Where it is opened, these have another module than the one by which plain pickles look for them.
    """


_MAIN_NAME = "__notebook_accel_main_name__"  # on a worker's copy of a class: its name in the notebook


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, file: io.BytesIO, buffers: list[Buffer] | None, to_cpu: bool, leaves_run: bool
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=None if buffers is None else buffers.append)
        self._to_cpu = to_cpu
        self._leaves_run = leaves_run
        self.sharing = Sharing()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._names: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            return self._reduce_tensor(obj)
        if type(obj) is torch.Tensor and self._to_cpu and obj.device.type == "xla":
            return self._reduce_tensor(obj.detach().cpu().requires_grad_(obj.requires_grad and obj.is_leaf))
        if issubclass(type(obj), DataLoader) and vars(obj).get("_iterator") is not None:
            made = copy.copy(obj)
            vars(made)["_iterator"] = None  # its worker processes belong to this process
            return made.__reduce_ex__(5)
        if type(obj) is torch.UntypedStorage:
            data: Any = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj).numpy()
            return _make_storage, (pickle.PickleBuffer(data),)
        if isinstance(obj, functools._lru_cache_wrapper) and obj.__module__ == "__main__":
            self._note_name(obj)
            return _make_cached, (obj.__wrapped__, obj.cache_parameters())
        if type(obj) is functools.cached_property:  # before Python 3.12 it has a lock
            return _make_cached_property, (obj.func, obj.attrname)
        if _is_module_of_own_class(obj):
            return importlib.import_module, (obj.__name__,)
        if type(obj) is Names:
            return dict, (), None, None, iter(list(self._names.items()))
        if _is_shell(obj):
            return _get_shell, ()
        if self._leaves_run and is_accelerator(obj):
            return LeftBehind, (describe(obj),)
        if self._leaves_run and is_their_state(obj):
            return join_state, (type(obj),)
        if type(obj) is types.CodeType:
            # since 3.1.3 cloudpickle drops the name of the file, by which tracebacks find the lines of cells
            return _make_code, (*self.dispatch_table[types.CodeType](obj), obj.co_filename)
        reduced = super().reducer_override(obj)
        if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__":
            self._note_name(obj)
            if isinstance(obj, type) and isinstance(reduced, tuple):
                return _prefer_own(obj, reduced)
        return reduced

    def _note_name(self, obj: Any) -> None:
        if "." not in obj.__qualname__ and _find_in_main(obj.__qualname__) is obj:
            self._names[obj.__qualname__] = obj

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        device = None if self._to_cpu or tensor.device.type == "cpu" else str(tensor.device)
        requires_grad = tensor.requires_grad and (tensor.is_leaf or not self._to_cpu)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = storage.cpu() if tensor.device.type != "cpu" else storage
        layout = (tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        flags = (requires_grad, tensor.is_conj(), tensor.is_neg())
        return _make_tensor, (self._storages[key], *layout, *flags, device)


class _SharingPacker(_Packer):
    def persistent_id(self, obj: Any) -> int | None:
        return obj.number if type(obj) is Descriptor else None

    def reducer_override(self, obj: Any) -> Any:
        return self.sharing.reduce(obj) or super().reducer_override(obj)


def _make_code(make: Callable[..., types.CodeType], args: tuple[Any, ...], filename: str) -> types.CodeType:
    code = make(*args)
    return code if code.co_filename == filename else code.replace(co_filename=filename)


def _make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _make_cached_property(function: Callable[[Any], Any], name: str | None) -> Any:
    made: Any = functools.cached_property(function)
    if name is not None:
        made.__set_name__(None, name)
    return made


def _is_module_of_own_class(obj: Any) -> bool:
    """Return whether an object is a module that cloudpickle takes for none, such as `torch.backends.cudnn`."""
    is_other = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
    return is_other and sys.modules.get(obj.__name__) is obj


def _is_shell(obj: Any) -> bool:
    module = sys.modules.get("IPython.core.interactiveshell")
    return module is not None and isinstance(obj, module.InteractiveShell)


def _get_shell() -> Any:
    """Return the receiver's own shell, for functions with `!command` or `get_ipython()`."""
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _prefer_own(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Change how cloudpickle makes a class: the receiver's class of that name in `__main__` comes first."""
    make, args, state, items, pairs, set_state = reduced + (None,) * (6 - len(reduced))
    if make.__name__ == "_make_skeleton_class":
        args, state = _keep_slots(args, state)
    name = cls.__qualname__ if _find_own_class(cls.__qualname__) is cls else vars(cls).get(_MAIN_NAME)
    setter = functools.partial(_set_class_state, set_state, name)
    return _make_class, (name, make, args), state, items, pairs, setter


def _keep_slots(args: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Let a class be made with slots: cloudpickle makes it without, and its instances do not fit the notebook's."""
    slots = state[0].get("__slots__")
    if not slots or not isinstance(slots, (str, list, tuple, dict)):  # those of a NamedTuple are empty
        return args, state
    kind, name, bases, options, *rest = args
    others = {key: value for key, value in state[0].items() if key != "__slots__"}
    return (kind, name, bases, {**options, "__slots__": slots}, *rest), (others, *state[1:])


def _make_class(name: str | None, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    return _find_own_class(name) or make(*args)


def _set_class_state(set_state: Callable[[type, Any], None], name: str | None, cls: type, state: Any) -> None:
    if name is not None and _find_own_class(name) is cls:
        return
    set_state(cls, state)
    if name is not None:
        type.__setattr__(cls, _MAIN_NAME, name)


def _find_own_class(name: str | None) -> type | None:
    """Return this process's class of that name in `__main__`."""
    found = _find_in_main(name)
    return found if isinstance(found, type) else None


def _find_in_main(name: str | None) -> Any:
    found: Any = sys.modules.get("__main__") if name else None
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type not in ("meta", "xla")
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not tensor.__dict__
    )


def _make_tensor(
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
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
    tensor = tensor.conj() if conj else tensor
    tensor = torch._neg_view(tensor) if neg else tensor
    if device is not None:
        tensor = tensor.to(device)
    return tensor.requires_grad_(requires_grad)


def _make_storage(data: Any) -> torch.UntypedStorage:
    view = memoryview(data)
    if view.nbytes == 0:
        return torch.UntypedStorage(0)
    if view.readonly:
        view = memoryview(bytearray(view))
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
