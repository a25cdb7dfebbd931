"""A fake accelerator: torch's device type `fake`, of which a machine has several; its memory is the CPU's.

`install` registers it with torch for the life of the process: only processes that end with the test may call it.
Kernels run on views of the same memory on the CPU, by torch's boxed fallback for the dispatch key PrivateUse1. As on
CUDA, tensors of two devices do not mix, and a copy is the only way across.

What torch leaves to C++, and what stands for it here:

- The device guard of a Python back end knows device 0 alone. So `tensor.to("fake")` and `torch.device("fake")` in C++
  mean `fake:0`; with an index everything works. Backward runs in the calling thread.
- There is no C++ generator: `torch.Generator("fake")` raises. The module has a seed and an offset for each device.
- There is no C++ allocator. Memory is counted here; `torch.accelerator` is pointed to the functions of the module.
- Streams and events keep their order and do nothing, because kernels are done when they return.
- A storage does not change its size in C++. `resize_` changes the memory that kernels see.
- The generic cache of C++ for pinned memory is missing. `pin_memory` copies, and remembers that memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from tests.unit.fake_kernels import Copies, Kernels, Memory, add_autocast

_FIRST_SEED = 67280421310721  # of devices that nobody seeded, as CUDA has it


class Stream(torch.Stream):
    """A stream; kernels are done when they return, so that its order is that of the calls."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=torch.device(installed().name, 0))

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.place = installed().device_of(device)
        self.waited: list[Any] = []

    def record_event(self, event: Any = None) -> Event:
        """Return an event of this stream."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Note an event that this stream waits for."""
        self.waited.append(event)

    def wait_stream(self, stream: Any) -> None:
        """Note a stream that this one waits for."""
        self.waited.append(stream)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True


class Event:
    """A moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Any = None) -> None:
        """Note the stream."""
        self.stream = stream or installed().current_stream()

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for this."""
        (stream or installed().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return no time."""
        return 0.0


class Generator:
    """The random numbers of a device: a seed, and how often they were asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seed_value = _FIRST_SEED
        self.offset = 0

    def manual_seed(self, seed: int) -> Generator:
        """Start with a seed."""
        self.seed_value, self.offset = seed, 0
        return self

    def initial_seed(self) -> int:
        """Return the seed."""
        return self.seed_value

    def seed(self) -> int:
        """Start with a seed of the system."""
        self.manual_seed(int.from_bytes(os.urandom(7), "little"))
        return self.seed_value

    def get_state(self) -> torch.Tensor:
        """Return seed and offset as 16 bytes, as CUDA has them."""
        return torch.tensor([self.seed_value, self.offset], dtype=torch.int64).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Take a state."""
        if state.device.type != "cpu" or state.dtype != torch.uint8 or state.numel() != 16:
            raise TypeError(f"RNG state must be 16 bytes of the CPU, not {state.numel()} of {state.device}")
        self.seed_value, self.offset = state.clone().view(torch.int64).tolist()

    def next_seed(self) -> int:
        """Return what the next operation draws its numbers from."""
        self.offset += 4
        return (self.seed_value * 6364136223846793005 + self.offset * 1442695040888963407) % 2**63


class FakeModule(types.ModuleType):
    """What is `torch.fake`: the functions that a device's maker gives torch.

    Args:
        count: number of devices.
        limit: bytes of each.
        name: torch's device type.
    """

    def __init__(self, count: int, limit: int, name: str) -> None:
        super().__init__(f"torch.{name}")
        self.name = name
        self.memory = Memory(count, limit)
        self.Stream, self.Event = Stream, Event
        self.OutOfMemoryError = torch.OutOfMemoryError
        self.emptied = 0  # calls of empty_cache
        self.has_bf16 = True
        self.kernels: Any = None
        self.copies: Any = None
        self.groups: Any = None
        self.libraries: tuple[Any, ...] = ()
        self._here = threading.local()
        self._seed: int | None = None
        self._generators: tuple[Generator, ...] = ()
        self._in_bad_fork = False
        os.register_at_fork(after_in_child=self._note_fork)

    def __reduce__(self) -> Any:
        return installed, ()

    def is_available(self) -> bool:
        """Return whether there are devices."""
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        """Return whether this process uses the devices."""
        return bool(self._generators) and not self._in_bad_fork

    def _is_in_bad_fork(self) -> bool:
        return self._in_bad_fork

    def _note_fork(self) -> None:
        self._in_bad_fork = bool(self._generators)

    def init(self) -> None:
        """Start the devices; they do not survive a fork."""
        if self._in_bad_fork:
            raise RuntimeError("Cannot re-initialize FAKE in forked subprocess: use the 'spawn' start method")
        if not self._generators:
            devices = [torch.device(self.name, index) for index in range(self.device_count())]
            self._generators = tuple(Generator(device) for device in devices)
            for generator in self._generators:
                generator.manual_seed(_FIRST_SEED if self._seed is None else self._seed)

    @property
    def default_generators(self) -> tuple[Generator, ...]:
        """The generator of each device."""
        self.init()
        return self._generators

    def device_count(self) -> int:
        """Return the number of devices."""
        return len(self.memory.used)

    def current_device(self) -> int:
        """Return the device of this thread."""
        return getattr(self._here, "index", 0)

    def set_device(self, device: Any) -> None:
        """Make a device that of this thread."""
        index = self.device_of(device).index
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"FAKE error: invalid device ordinal {index}, there are {self.device_count()}")
        self.init()
        self._here.index = index

    def device_of(self, device: Any) -> torch.device:
        """Return a device with its index, of a number, a name or None for the current one."""
        if isinstance(device, int):
            return torch.device(self.name, device)
        named = torch.device(self.name if device is None else device)
        if named.type != self.name:
            raise ValueError(f"Expected a {self.name} device, but got: {named}")
        return torch.device(self.name, self.current_device() if named.index is None else named.index)

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Make a device the current one inside."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._here.index = before

    def synchronize(self, device: Any = None) -> None:
        """Return at once: kernels are done when they return."""
        self.device_of(device)

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream of this thread."""
        if getattr(self._here, "stream", None) is None:
            self._here.stream = Stream(self.device_of(device))
        stream: Stream = self._here.stream
        return stream

    def set_stream(self, stream: Stream) -> None:
        """Make a stream that of this thread."""
        self._here.stream = stream

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream that of this thread inside."""
        before = self.current_stream()
        self._here.stream = stream
        try:
            yield
        finally:
            self._here.stream = before

    def memory_allocated(self, device: Any = None) -> int:
        """Return bytes of living storages."""
        return self.memory.used[self.device_of(device).index]

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the most bytes there have been."""
        return self.memory.peak[self.device_of(device).index]

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Forget the most bytes there have been."""
        index = self.device_of(device).index
        self.memory.peak[index] = self.memory.used[index]

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return bytes that are free, and all."""
        self.init()
        return self.memory.limit - self.memory_allocated(device), self.memory.limit

    def empty_cache(self) -> None:
        """Count the call: there is no cache."""
        self.emptied += 1

    def get_device_properties(self, device: Any = None) -> Any:
        """Return name and memory of a device."""
        return types.SimpleNamespace(
            name=f"Fake {self.device_of(device).index}", total_memory=self.memory.limit
        )

    def get_device_name(self, device: Any = None) -> str:
        """Return the name of a device."""
        return str(self.get_device_properties(device).name)

    def manual_seed(self, seed: int) -> None:
        """Seed the current device; before the first use, all."""
        if self.is_initialized():
            self._generators[self.current_device()].manual_seed(seed)
        else:
            self._seed = seed

    def manual_seed_all(self, seed: int) -> None:
        """Seed all devices, without starting them."""
        self._seed = seed
        for generator in self._generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        """Return the seed of the current device."""
        return self.default_generators[self.current_device()].initial_seed()

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the random state of a device."""
        return self.default_generators[self.device_of(device).index].get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set the random state of a device."""
        self.default_generators[self.device_of(device).index].set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the random states of all devices."""
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: Any) -> None:
        """Set the random states of all devices."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def next_seed(self, index: int) -> int:
        """Return what the next operation on a device draws its numbers from."""
        return self.default_generators[index].next_seed()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes of autocast."""
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self) -> bool:
        """Return whether the devices compute in bfloat16."""
        return self.has_bf16


if not hasattr(torch._C, "_acc"):
    pytest.skip(f"torch {torch.__version__} takes no device made in Python", allow_module_level=True)


def installed() -> FakeModule:
    """Return the devices of this process."""
    name = torch._C._get_privateuse1_backend_name()
    module: FakeModule = getattr(torch, name)
    return module


class _Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[name-defined,misc]
    """Tells torch that the devices are there."""

    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return installed().is_initialized()


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined,misc]
    """Tells torch what the devices are."""

    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


def install(count: int = 4, limit: int = 2**30, name: str = "fake") -> FakeModule:
    """Give this process fake devices, for the rest of its life.

    Args:
        count: number of devices.
        limit: bytes of each.
        name: torch's device type.
    """
    module = FakeModule(count, limit, name)
    backend_registration._setup_privateuseone_for_python_backend(name, module, _Hooks(), _Guard())
    module.kernels = kernels = Kernels(module)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(kernels, "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    own.impl("convolution_overrideable", kernels.convolve, "PrivateUse1")
    own.impl("convolution_backward_overrideable", kernels.convolve_backward, "PrivateUse1")
    module.copies = Copies(kernels)
    module.copies.register(own)
    add_autocast(own)
    module.libraries = (everything, own)  # what they registered lives as long as they do
    _add_storage(module, kernels)
    _mend_tensors(module)
    _point_accelerator_to(module)
    torch.autograd.set_multithreading_enabled(False)
    return module


def _add_storage(module: FakeModule, kernels: Kernels) -> None:
    """Let storages change their size, and files be loaded to the devices."""
    resize = torch.UntypedStorage.resize_

    def resize_any(storage: torch.UntypedStorage, size: int) -> Any:
        if storage.device.type != module.name:
            return resize(storage, size)
        module.memory.resize(storage, size)
        return storage

    nbytes = torch.UntypedStorage.nbytes

    def nbytes_of_any(storage: torch.UntypedStorage) -> int:
        own = storage.device.type == module.name
        return module.memory.block_of_storage(storage).memory.nbytes() if own else nbytes(storage)

    def tag(storage: Any) -> str | None:
        return str(storage.device) if storage.device.type == module.name else None

    def restore(storage: Any, location: str) -> Any:
        if not location.startswith(module.name):
            return None
        source = storage.untyped() if hasattr(storage, "untyped") else storage
        copy = torch.UntypedStorage(source.nbytes()).copy_(source)
        return module.memory.wrap(copy, module.device_of(location).index).untyped_storage()

    make = torch.UntypedStorage.__new__

    def make_any(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != module.name:
            return (
                make(kind, *args, **kwargs) if device is None else make(kind, *args, device=device, **kwargs)
            )
        memory = torch.UntypedStorage(*args)
        return module.memory.wrap(memory, module.device_of(device).index).untyped_storage()

    torch.UntypedStorage.__new__ = make_any  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.resize_ = resize_any  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.nbytes = torch.UntypedStorage.size = nbytes_of_any  # type: ignore[method-assign]
    torch.serialization.register_package(5, tag, restore)


def _mend_tensors(module: FakeModule) -> None:
    """Let tensors follow the current device, and `data` take tensors of devices, as C++ does for torch's own."""
    move, make, empty, data = torch.Tensor.to, torch.tensor, torch.empty, torch.Tensor.data

    def with_index(device: Any) -> Any:
        named = torch.device(device) if isinstance(device, str) else device
        bare = isinstance(named, torch.device) and named.type == module.name and named.index is None
        return module.device_of(None) if bare else device

    def move_any(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = {key: with_index(value) if key == "device" else value for key, value in kwargs.items()}
        return move(tensor, *map(with_index, args), **kwargs)

    def make_any(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return make(*args, device=with_index(device), **kwargs)

    def make_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return module.copies.pin(made) if pin_memory else made

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if torch._has_compatible_shallow_copy_type(tensor, value):
            data.__set__(tensor, value)
        else:
            new = value.detach()
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(new, tensor.requires_grad))

    torch.Tensor.to = move_any  # type: ignore[method-assign,assignment]
    torch.tensor = make_any
    torch.empty = make_empty
    torch.Tensor.data = property(lambda tensor: data.__get__(tensor), set_data)  # type: ignore[assignment]


def _point_accelerator_to(module: FakeModule) -> None:
    """Let torch.accelerator ask the module for what C++ does not know of a Python back end."""
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = module.current_device
    accelerator.set_device_index = module.set_device
    accelerator.synchronize = module.synchronize
    accelerator.current_stream = module.current_stream
    accelerator.set_stream = module.set_stream
    accelerator.empty_cache = module.empty_cache
    accelerator.memory_allocated = module.memory_allocated
    accelerator.max_memory_allocated = module.max_memory_allocated
    accelerator.reset_peak_memory_stats = module.reset_peak_memory_stats
    accelerator.get_memory_info = module.mem_get_info
