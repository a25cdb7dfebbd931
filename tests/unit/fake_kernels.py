"""The memory of a fake accelerator, and torch's kernels of the CPU that run on it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


class _DLTensor(ctypes.Structure):
    """A tensor as DLPack has it: the way by which torch takes memory of any device."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int),
        ("device_index", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _DLManaged(ctypes.Structure):
    """A tensor of DLPack with the function that frees it."""


_DLManaged._fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]
_CPU = torch._C.DispatchKeySet(torch.DispatchKey.CPU)
_EXTENSION, _UINT = 12, 1  # kDLExtDev and kDLUInt
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one storage of a device.

    Attributes:
        memory: the bytes.
        index: of the device.
        nbytes: as counted.
        end: called when torch's storage ends.
    """

    memory: torch.UntypedStorage
    index: int
    nbytes: int
    end: Any = None


class Memory:
    """The memory of all devices: what lives, by device, and the limit of each.

    Attributes:
        limit: bytes of a device.
        used: bytes of living storages, by device.
        peak: the most there have been, by device.
    """

    def __init__(self, count: int, limit: int) -> None:
        self.limit = limit
        self.used = [0] * count
        self.peak = [0] * count
        self.lock = threading.RLock()
        self._blocks: dict[int, Block] = {}  # by the address of torch's storage

    def take(self, index: int, nbytes: int) -> None:
        """Count bytes of a device; torch.OutOfMemoryError where it has not as many."""
        with self.lock:
            if self.used[index] + nbytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"FAKE out of memory. Tried to allocate {nbytes} bytes. Device {index} has a capacity of "
                    f"{self.limit} bytes, of which {self.used[index]} are in use"
                )
            self.used[index] += nbytes
            self.peak[index] = max(self.peak[index], self.used[index])

    def wrap(self, memory: torch.UntypedStorage, index: int) -> torch.Tensor:
        """Return bytes of the CPU as a tensor of a device."""
        if not 0 <= index < len(self.used):
            raise RuntimeError(f"FAKE error: invalid device ordinal {index}, there are {len(self.used)}")
        self.take(index, memory.nbytes())
        # the address is no tensor's memory: whoever reads it on the CPU reads nonsense, as with that of a GPU
        address = _libc.malloc(ctypes.sizeof(_DLManaged))
        one, size = (ctypes.c_int64 * 1)(1), (ctypes.c_int64 * 1)(memory.nbytes())
        managed = _DLManaged.from_address(address)
        managed.tensor = _DLTensor(address, _EXTENSION, index, 1, _UINT, 8, 1, size, one, 0)
        managed.deleter = _FREE
        made = torch.utils.dlpack.from_dlpack(_new_capsule(address, b"dltensor", None))
        storage = made.untyped_storage()
        key = storage._cdata
        self._blocks[key] = Block(
            memory, index, memory.nbytes(), weakref.ref(storage, lambda _: self._drop(key))
        )
        return made

    def block_of(self, tensor: torch.Tensor) -> Block:
        """Return the memory of a device's tensor."""
        return self.block_of_storage(tensor.untyped_storage())

    def block_of_storage(self, storage: torch.UntypedStorage) -> Block:
        """Return the memory of a device's storage."""
        return self._blocks[storage._cdata]

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give a storage another size, as FSDP does to free it; what grows holds no old values."""
        block = self._blocks[storage._cdata]
        self.take(block.index, nbytes - block.nbytes)
        block.nbytes = nbytes
        block.memory.resize_(nbytes)

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key)
        with self.lock:
            self.used[block.index] -= block.nbytes


class Kernels:
    """Runs torch's kernels of the CPU on tensors of the devices.

    Args:
        module: the devices.
    """

    # what CUDA takes indices of the CPU for, and what copies between devices
    MIXING = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_copy_from"})

    def __init__(self, module: Any) -> None:
        self.module = module
        self.name = module.name
        self.memory = module.memory
        self.recorded: list[tuple[torch.device, Any]] = []  # tensors' devices and streams that use them

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that has no kernel of its own; see torch.library's fallback."""
        name, schema = op._schema.name, op._schema
        returned = [None if value.alias_info is None else value.alias_info for value in schema.returns]
        if returned and all(info is not None and not info.is_write for info in returned):
            return op.redispatch(_CPU, *args, **kwargs)  # a view, which no kernel computes
        if name.startswith("aten::set_"):
            return op.redispatch(_CPU, *args, **kwargs)
        if name == "aten::record_stream":
            return self.recorded.append((args[0].device, args[1]))
        if name == "aten::resize_":
            return self._resize(*args, **kwargs)
        index = self._find_index(name, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is not None:
            own = torch.device(wanted).type == self.name
            index = (self.module.current_device() if wanted.index is None else wanted.index) if own else None
            kwargs = {**kwargs, "device": torch.device("cpu") if own else wanted, "pin_memory": False}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        inputs = [self._lower(value, pairs) for value in args]
        named = {key: self._lower(value, pairs) for key, value in kwargs.items()}
        with self._random_numbers(op, index, named):
            found = op(*inputs, **named)
        return self._lift(op, found, pairs, index)

    def _find_index(self, name: str, args: Any, kwargs: Any) -> int | None:
        tensors = [leaf for leaf in _leaves([args, kwargs]) if isinstance(leaf, torch.Tensor)]
        places = sorted({str(t.device) for t in tensors if t.device.type == self.name or t.dim() > 0})
        if len(places) > 1 and name not in self.MIXING:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{places[0]} and {places[1]}! (when running {name})"
            )
        return next((t.device.index for t in tensors if t.device.type == self.name), None)

    def lower(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the CPU over the memory of a device's tensor; others as they are."""
        if tensor.device.type != self.name:
            return tensor
        memory = self.memory.block_of(tensor).memory
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _lower(self, value: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        if isinstance(value, torch.Tensor):
            lowered = self.lower(value)
            pairs.append((lowered, value))
            return lowered
        if isinstance(value, (list, tuple)):
            return type(value)(self._lower(one, pairs) for one in value)
        return value

    def _lift(
        self, op: Any, found: Any, pairs: list[tuple[torch.Tensor, torch.Tensor]], index: int | None
    ) -> Any:
        """Return what a kernel returned on the device: arguments that it wrote to, or new tensors."""
        if isinstance(found, torch.Tensor):
            for lowered, given in pairs:
                if found is lowered:
                    if given.shape != found.shape:  # out=, which took another size
                        self._adopt_into(given, found)
                    return given
            return found if index is None else self.raise_to(found, index)
        if isinstance(found, (list, tuple)):
            return type(found)(self._lift(op, one, pairs, index) for one in found)
        return found

    def raise_to(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Return a new tensor of a device over the memory of one of the CPU, which nobody else may have."""
        raw = self.memory.wrap(tensor.untyped_storage(), index)
        typed = torch.ops.aten.view.dtype.redispatch(_CPU, raw, tensor.dtype)
        return torch.ops.aten.as_strided.default.redispatch(
            _CPU, typed, tensor.shape, tensor.stride(), tensor.storage_offset()
        )

    def _adopt_into(self, given: torch.Tensor, found: torch.Tensor) -> None:
        new = self.raise_to(found.clone(), given.device.index)
        torch.ops.aten.set_.source_Tensor.redispatch(_CPU, given, new)

    def _resize(self, tensor: torch.Tensor, size: Any, **kwargs: Any) -> torch.Tensor:
        if tuple(tensor.shape) != tuple(size):
            old = self.lower(tensor)
            self._adopt_into(tensor, old.clone().resize_(size, **kwargs))
        return tensor

    def convolve(self, *args: Any) -> torch.Tensor:
        """Run a convolution, which has a name of its own for devices of other makers."""
        found: torch.Tensor = self(torch.ops.aten.convolution.default, *args)
        return found

    def convolve_backward(self, grad: Any, data: Any, weight: Any, *rest: Any) -> Any:
        stride, padding, dilation, transposed, output_padding, groups, mask = rest
        bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
        return self(
            torch.ops.aten.convolution_backward.default,
            *(grad, data, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask),
        )

    @contextlib.contextmanager
    def _random_numbers(self, op: Any, index: int | None, named: dict[str, Any]) -> Iterator[None]:
        """Let an operation that draws numbers draw those of the device, whose state then goes on."""
        if torch.Tag.nondeterministic_seeded not in op.tags or index is None:
            yield
            return
        if named.get("generator") is not None:
            raise RuntimeError(f"Expected a '{self.name}' device type for generator but found 'cpu'")
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(self.module.next_seed(index))
        try:
            yield
        finally:
            torch.set_rng_state(before)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


class Copies:
    """The copies between devices and the CPU, and pinned memory.

    Attributes:
        seen: of each copy source, target, whether it blocks, and whether memory of the CPU in it was pinned.
    """

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.seen: list[tuple[str, str, bool, bool]] = []
        self._pinned: dict[int, Any] = {}

    def register(self, library: torch.library.Library) -> None:
        """Put them among torch's operations."""
        library.impl("_copy_from", self.copy, "PrivateUse1")
        library.impl("_to_copy", self.copy_to, "PrivateUse1")
        library.impl("_pin_memory", self.pin, "CPU")
        library.impl("is_pinned", self.is_pinned, "CPU")

    def copy(self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Copy from anywhere to anywhere."""
        pinned = any(self.is_pinned(one) for one in (source, target) if one.device.type == "cpu")
        self.seen.append((str(source.device), str(target.device), bool(non_blocking), pinned))
        self.kernels.module.init()
        self.kernels.lower(target).copy_(self.kernels.lower(source))
        return target

    def copy_to(self, source: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return a copy on another device or in another dtype; on the CPU it is pinned where `non_blocking`."""
        device = options.get("device") or source.device
        non_blocking = bool(options.pop("non_blocking", False))
        made = torch.ops.aten._to_copy(
            self.kernels.lower(source), **{**options, "device": None, "pin_memory": None}
        )
        if device.type == self.kernels.name:
            made = self.kernels.raise_to(made, self.kernels.module.device_of(device).index)
        elif device.type != "cpu":
            return made.to(device)
        elif non_blocking:
            self._note(made)
        self.seen.append((str(source.device), str(made.device), non_blocking, non_blocking))
        return made

    def pin(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        """Return a copy in pinned memory."""
        made = tensor.clone(memory_format=torch.contiguous_format)
        self._note(made)
        return made

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))

    def is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        """Return whether memory is pinned."""
        reference = self._pinned.get(tensor.untyped_storage()._cdata)
        return reference is not None


_LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "conv1d", "conv2d", "scaled_dot_product_attention")
_FLOAT = ("softmax.int", "log_softmax.int", "nll_loss", "cross_entropy_loss", "layer_norm", "mse_loss")


def add_autocast(library: torch.library.Library) -> None:
    """Give autocast its lists: what computes in its dtype, and what in float32.

    Args:
        library: of `aten`.
    """
    keys = torch._C.DispatchKeySet(torch.DispatchKey.AutocastPrivateUse1)
    name = torch._C._get_privateuse1_backend_name()

    def make(op: Any, dtype: torch.dtype | None) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            wanted = dtype or torch.get_autocast_dtype(name)
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return op(*_cast(args, wanted), **_cast(kwargs, wanted))

        return run

    for names, dtype in ((_LOWER, None), (_FLOAT, torch.float32)):
        for one in names:
            base, _, overload = one.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            library.impl(one, make(op, dtype), "AutocastPrivateUse1")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {key: _cast(one, dtype) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(one, dtype) for one in value)
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type != "cpu":
        return value.to(dtype)
    return value
