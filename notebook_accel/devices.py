"""A row for each kind of device; counts and chooses devices without initialising one."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import cuda_count, environ, probes, tpu

if TYPE_CHECKING:  # functions import it where they need it: the command line starts faster without torch
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """The properties of a kind of device.

    Attributes:
        name: torch's device type.
        label: its name in messages.
        plural: the name of several.
        backend: collective backend of torch.distributed, None where the kind has none.
        autocast: device type for `torch.autocast`.
        indexed: True where devices of one machine are numbered.
        counter: returns the number of devices, without initialising them.
        distributed_type: the `DistributedType` of a run on several, under Accelerate's names.
        visible: the variable that names the devices that a process may use, None where the kind has none.
    """

    name: str
    label: str
    plural: str
    backend: str | None
    autocast: str
    indexed: bool
    counter: Callable[[], int]
    distributed_type: str = "MULTI_GPU"
    visible: str | None = None

    @property
    def both_backends(self) -> str:
        """The backend and that of CPU tensors, as torch.distributed names several; the CPU has one."""
        return str(self.backend) if self.name == "cpu" else f"cpu:{CPU.backend},{self.name}:{self.backend}"

    def __reduce__(self) -> tuple[Any, ...]:
        return kind_of, (self.name,)  # there is one of each kind


def _num_cuda() -> int:
    import torch

    if not torch.backends.cuda.is_built():
        return 0
    found = cuda_count.count() if os.path.exists(cuda_count.DRIVER) else None
    # device_count() asks NVML, but falls back to the CUDA runtime where NVML fails; neither makes a context
    return torch.cuda.device_count() if found is None else found


def _num_xpu() -> int:
    import torch

    return torch.xpu.device_count() if hasattr(torch, "xpu") and torch.xpu._is_compiled() else 0


def _num_xla() -> int:
    # only chips count: torch_xla sets PJRT_DEVICE=CPU itself when it is imported on a machine without a TPU
    return tpu.num_processes() if tpu.is_here() and probes.is_available("torch_xla") else 0


def _num_mps() -> int:
    import torch

    return int(torch.backends.mps.is_available())


def _num_cpu() -> int:
    return 1


CPU: Final = DeviceKind(
    name="cpu",
    label="CPU",
    plural="CPU processes",
    backend="gloo",
    autocast="cpu",
    indexed=False,
    counter=_num_cpu,
    distributed_type="MULTI_CPU",
)
CUDA: Final = DeviceKind(
    name="cuda",
    label="CUDA GPU",
    plural="CUDA GPUs",
    backend="nccl",
    autocast="cuda",
    indexed=True,
    counter=_num_cuda,
    visible="CUDA_VISIBLE_DEVICES",
)
XPU: Final = DeviceKind(
    name="xpu",
    label="Intel GPU",
    plural="Intel GPUs",
    backend="xccl",
    autocast="xpu",
    indexed=True,
    counter=_num_xpu,
    distributed_type="MULTI_XPU",
    visible="ZE_AFFINITY_MASK",
)
XLA: Final = DeviceKind(
    name="xla",
    label="XLA device",
    plural="XLA devices",
    backend="xla",
    autocast="xla",
    indexed=False,
    counter=_num_xla,
    distributed_type="XLA",
    visible="TPU_VISIBLE_CHIPS",
)
MPS: Final = DeviceKind(
    name="mps",
    label="Apple GPU",
    plural="Apple GPUs",
    backend=None,
    autocast="mps",
    indexed=False,
    counter=_num_mps,
    distributed_type="MULTI_CPU",  # torch has no collectives between Apple's GPUs
)


def _extend(name: str, maker: str, backend: str, visible: str) -> DeviceKind:
    """Return the row of a kind that a package of its maker adds to torch."""
    return DeviceKind(
        name=name,
        label=f"{maker} {name.upper()}",
        plural=f"{maker} {name.upper()}s",
        backend=backend,
        autocast=name,
        indexed=True,
        counter=functools.partial(_count_extended, name),
        distributed_type=f"MULTI_{name.upper()}",
        visible=visible,
    )


def _count_extended(name: str) -> int:
    import torch

    module: Any = getattr(torch, name, None)  # torch imports the makers' packages
    return int(module.device_count()) if module is not None and module.is_available() else 0


EXTENSIONS: Final = (
    _extend("npu", "Ascend", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    _extend("mlu", "Cambricon", "cncl", "MLU_VISIBLE_DEVICES"),
    _extend("musa", "Moore Threads", "mccl", "MUSA_VISIBLE_DEVICES"),
    _extend("sdaa", "Tecorigin", "tccl", "SDAA_VISIBLE_DEVICES"),
    _extend("hpu", "Gaudi", "hccl", "HABANA_VISIBLE_MODULES"),
    _extend("neuron", "AWS", "neuron", "NEURON_RT_VISIBLE_CORES"),
)
KINDS: Final = (XLA, CUDA, XPU, *EXTENSIONS, MPS, CPU)
"""All kinds that are known by name, in the order of preference."""


def _find_unlisted() -> DeviceKind | None:
    """Return a row for the accelerator of this torch, if it has one that no row is for."""
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)  # torch before 2.6 has none
    device = accelerator.current_accelerator() if accelerator is not None else None
    if device is None or any(kind.name == device.type for kind in KINDS):
        return None
    known = torch.distributed.Backend.default_device_backend_map if torch.distributed.is_available() else {}
    return DeviceKind(
        name=device.type,
        label=f"{device.type} device",
        plural=f"{device.type} devices",
        backend=known.get(device.type),
        autocast=device.type,
        indexed=True,
        counter=accelerator.device_count,
    )


def kind_of(name: str) -> DeviceKind:
    """Return the row of a kind of device.

    Args:
        name: torch's device type, such as `cuda`.

    Raises:
        ValueError: there is no row; the message lists the names.
    """
    for kind in KINDS:
        if kind.name == name:
            return kind
    unlisted = _find_unlisted()
    if unlisted is not None and unlisted.name == name:
        return unlisted
    raise ValueError(
        f"device type {name!r} is not supported, choose among {', '.join(row.name for row in KINDS)}"
    )


def find_requested(environment: Mapping[str, str] | None = None) -> torch.device | None:
    """Return the device that ACCELERATE_TORCH_DEVICE names, None where it is not set.

    Args:
        environment: variables that override those of this process.

    Raises:
        ValueError: torch does not know the device.
    """
    import torch

    text = {**environ.snapshot(), **(environment or {})}.get("ACCELERATE_TORCH_DEVICE")
    if not text:
        return None
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(
            f"environment variable ACCELERATE_TORCH_DEVICE={text!r} is no device: {error}"
        ) from None


def find_absence(kind: DeviceKind, environment: Mapping[str, str] | None = None) -> str:
    """Return why processes of this machine cannot have the device that ACCELERATE_TORCH_DEVICE names.

    Args:
        kind: of the device that they compute on.
        environment: variables that override those of this process.

    Returns:
        A sentence; empty if the device is here, or if the variable names none of this kind. XLA devices are not
        counted here: torch_xla also computes on the CPU.

    Raises:
        ValueError: torch does not know the device.
    """
    wanted = find_requested(environment)
    if wanted is None or wanted.type != kind.name or kind is CPU or kind is XLA:
        return ""
    present = kind.counter()
    if (wanted.index or 0) < present:
        return ""
    has = f"{describe_count(present, kind)}, counted from 0" if present else f"no {kind.label}"
    return (
        f"ACCELERATE_TORCH_DEVICE={str(wanted)!r}: this machine has {has}; unset it, or name a device that is here, "
        "such as 'cpu'"
    )


def best(
    use_cpu: bool | None = None,
    has_tpu: bool | None = None,
    environment: Mapping[str, str] | None = None,
) -> DeviceKind:
    """Return the kind that this process uses: the environment's choice, else the first of `KINDS` with a device.

    An accelerator that torch has and `KINDS` has not comes before the CPU.

    Args:
        use_cpu: use the CPU; by default ACCELERATE_USE_CPU, which overrides ACCELERATE_TORCH_DEVICE.
        has_tpu: whether this machine has a TPU; by default it is looked for.
        environment: variables that override those of this process, for ACCELERATE_TORCH_DEVICE.

    Raises:
        ValueError: ACCELERATE_TORCH_DEVICE names a device of no known kind.
    """
    if environ.flag("ACCELERATE_USE_CPU") if use_cpu is None else use_cpu:
        return CPU
    wanted = find_requested(environment)
    return kind_of(wanted.type) if wanted is not None else find_first(has_tpu)


def find_first(has_tpu: bool | None = None) -> DeviceKind:
    """Return the first kind of `KINDS` of which this machine has a device, whatever the environment asks for.

    Args:
        has_tpu: whether this machine has a TPU; by default it is looked for.
    """
    kinds = [kind for kind in KINDS if kind is not XLA] if has_tpu is False else KINDS
    found = next(kind for kind in kinds if kind.counter() > 0)
    unlisted = _find_unlisted() if found is CPU else None
    return unlisted if unlisted is not None and unlisted.counter() > 0 else found


def with_cpu_collectives(options: dict[str, Any], use_cpu: bool | None = None) -> dict[str, Any]:
    """Return options of a process group that also has collectives of CPU tensors.

    Args:
        options: of the process group; a `backend` among them stays.
        use_cpu: see `best`.
    """
    kind = best(use_cpu)
    if "backend" in options or kind.backend in (None, CPU.backend):
        return options
    return {**options, "backend": kind.both_backends}


def count(kind: DeviceKind | str) -> int:
    """Return the number of devices of a kind on this machine, 1 for the CPU; none is initialised.

    Args:
        kind: the row, or torch's device type.

    Raises:
        ValueError: see `kind_of`.
    """
    return (kind_of(kind) if isinstance(kind, str) else kind).counter()


def count_usable(kind: DeviceKind, environment: Mapping[str, str] | None = None) -> int:
    """Return on how many devices of this machine the processes of a launch compute.

    Args:
        kind: of the devices.
        environment: variables that override those of this process.

    Returns:
        The number of devices; 1 where ACCELERATE_TORCH_DEVICE names one of them by its number.
    """
    return min(1, kind.counter()) if _find_named(kind, environment) else kind.counter()


def _find_named(kind: DeviceKind, environment: Mapping[str, str] | None) -> str:
    """Return the one device that ACCELERATE_TORCH_DEVICE names by its number, empty where it names none."""
    try:
        wanted = find_requested(environment)
    except ValueError:  # told where the kind of device is chosen
        return ""
    is_named = wanted is not None and wanted.type == kind.name and wanted.index is not None
    return str(wanted) if is_named and kind.indexed else ""


def describe_count(number: int, kind: DeviceKind) -> str:
    """Return a number of devices in words: `1 CUDA GPU`, `2 CUDA GPUs`."""
    return f"{number} {kind.label if number == 1 else kind.plural}"


def too_few(
    num_processes: int, kind: DeviceKind, present: int, environment: Mapping[str, str] | None = None
) -> str:
    """Return the message for a launch with more processes than devices.

    Args:
        num_processes: number of processes on this node.
        kind: of the devices.
        present: on how many of this machine they can compute.
        environment: variables that override those of this process.
    """
    if present and (named := _find_named(kind, environment)):
        return (
            f"num_processes={num_processes}: ACCELERATE_TORCH_DEVICE={named!r} names one device, on which all of them "
            f"would compute; start one process on each machine, or set ACCELERATE_TORCH_DEVICE={kind.name!r} for a "
            "device each"
        )
    return (
        f"num_processes={num_processes}: this machine has {describe_count(present, kind)}, so at most {present} is "
        "possible; "
        "set ACCELERATE_USE_CPU=1 in the environment to run on CPU processes instead"
    )


def device_for(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return the device of a process; ACCELERATE_TORCH_DEVICE with an index overrides the local rank.

    With fewer visible devices than processes, the devices are given out in turn. So a process whose own
    CUDA_VISIBLE_DEVICES names one device gets that one.

    Args:
        kind: of the device.
        local_rank: of the process on this node.

    Raises:
        ValueError: this machine has no device of the kind.
    """
    import torch

    wanted = find_requested()
    if wanted is not None and wanted.type == kind.name and wanted.index is not None:
        return wanted
    if not kind.indexed:
        return torch.device(kind.name)
    available = kind.counter()
    if available == 0:
        raise ValueError(find_absence(kind) or f"no {kind.label} was found on this machine")
    return torch.device(kind.name, local_rank % available)


def use(device: torch.device) -> None:
    """Make an indexed device the current one; this initialises it.

    Args:
        device: of this process; has no effect if its kind is not indexed.
    """
    import torch

    if device.index is not None and kind_of(device.type).indexed:
        getattr(torch, device.type).set_device(device)


def find_default() -> torch.device:
    """Return the device on which tensors are made where none is named.

    `torch.get_default_device` raises after `torch.set_default_device(None)`, in torch before 2.10.
    """
    import torch

    return torch.empty(0).device


def list_modules() -> dict[str, Any]:
    """Return torch's module of each kind of indexed devices that it knows, such as `torch.cuda`, by the kind's name."""
    import torch

    unlisted = _find_unlisted()
    kinds = [kind for kind in (*KINDS, unlisted) if kind is not None and kind.indexed]
    found = {kind.name: getattr(torch, kind.name, None) for kind in kinds}
    return {name: module for name, module in found.items() if module is not None}


def has_streams(device: torch.device) -> bool:
    """Return True if work on a device runs in streams, which Python code chooses."""
    module = list_modules().get(device.type)
    return all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))


def has_bf16(device: torch.device) -> bool:
    """Return True if a device computes in bfloat16, as far as torch's module of its kind says; it is initialised."""
    ask = getattr(list_modules().get(device.type), "is_bf16_supported", None)
    return ask is None or bool(ask())


def list_initialized() -> list[str]:
    """Return the device types that this process has initialised; a forked process cannot use them."""
    found = [name for name, module in list_modules().items() if _runtime_is_initialized(module)]
    mps: Any = sys.modules.get("torch.mps")
    if mps is not None and getattr(mps, "_default_mps_generator", None) is not None:
        found.append("mps")
    bindings: Any = sys.modules.get("_XLAC")
    if bindings is not None and bindings._xla_runtime_is_initialized():
        found.append("xla")
    return found


def empty_cache(device: torch.device) -> None:
    """Return the cached memory of a device to the system.

    Args:
        device: any; has no effect if its kind has no cache.
    """
    import torch

    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def _runtime_is_initialized(module: Any) -> bool:
    return hasattr(module, "is_initialized") and bool(module.is_initialized())


def share_of_cores(num_processes: int) -> int:
    """Return the number of CPU cores for each process, at least 1.

    Args:
        num_processes: processes on this node.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)
