"""A row per kind of device, and questions that are answered without initialising one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import environ, probes, tpu

if TYPE_CHECKING:  # imported by the questions that need it: the command reads options without
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """What differs between kinds of device.

    Attributes:
        name: torch's device type.
        label: for messages to people.
        plural: the label for several.
        backend: collective backend of torch.distributed, None where the kind has none.
        autocast: device type for `torch.autocast`.
        indexed: True where devices of one machine are numbered.
        counter: returns how many there are without initialising them.
    """

    name: str
    label: str
    plural: str
    backend: str | None
    autocast: str
    indexed: bool
    counter: Callable[[], int]


def _num_cuda() -> int:
    import torch

    # device_count() asks NVML, but falls back to the CUDA runtime where NVML fails; neither makes a context
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def _num_xpu() -> int:
    import torch

    return torch.xpu.device_count() if hasattr(torch, "xpu") and torch.xpu._is_compiled() else 0


def _num_xla() -> int:
    # chips alone are looked for: with PJRT_DEVICE=CPU torch_xla runs anywhere, and sets it itself at its import
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
)
CUDA: Final = DeviceKind(
    name="cuda",
    label="CUDA GPU",
    plural="CUDA GPUs",
    backend="nccl",
    autocast="cuda",
    indexed=True,
    counter=_num_cuda,
)
XPU: Final = DeviceKind(
    name="xpu",
    label="Intel GPU",
    plural="Intel GPUs",
    backend="xccl",
    autocast="xpu",
    indexed=True,
    counter=_num_xpu,
)
XLA: Final = DeviceKind(
    name="xla",
    label="XLA device",
    plural="XLA devices",
    backend="xla",
    autocast="xla",
    indexed=False,
    counter=_num_xla,
)
MPS: Final = DeviceKind(
    name="mps",
    label="Apple GPU",
    plural="Apple GPUs",
    backend=None,
    autocast="mps",
    indexed=False,
    counter=_num_mps,
)

KINDS: Final = (XLA, CUDA, XPU, MPS, CPU)
"""All kinds, the one to prefer first."""


def kind_of(name: str) -> DeviceKind:
    """Return the row of a torch device type; ValueError lists the known ones."""
    for kind in KINDS:
        if kind.name == name:
            return kind
    raise ValueError(
        f"device type {name!r} is not supported, choose among {', '.join(row.name for row in KINDS)}"
    )


def requested() -> torch.device | None:
    """Return the device of ACCELERATE_TORCH_DEVICE, None without; ValueError where torch does not know it."""
    import torch

    text = environ.get("ACCELERATE_TORCH_DEVICE")
    if not text:
        return None
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise ValueError(
            f"environment variable ACCELERATE_TORCH_DEVICE={text!r} is no device: {error}"
        ) from None


def best(use_cpu: bool | None = None) -> DeviceKind:
    """Return the kind this process is to use: as the environment asks, else the first in `KINDS` with a device.

    ACCELERATE_USE_CPU, or `use_cpu` in place of it, decides before ACCELERATE_TORCH_DEVICE.
    """
    if environ.flag("ACCELERATE_USE_CPU") if use_cpu is None else use_cpu:
        return CPU
    wanted = requested()
    if wanted is not None:
        return kind_of(wanted.type)
    return next(kind for kind in KINDS if kind.counter() > 0)


def with_cpu_collectives(options: dict[str, Any], use_cpu: bool | None = None) -> dict[str, Any]:
    """Return options of a process group that has collectives of CPU tensors besides those of the device to use."""
    kind = best(use_cpu)
    if "backend" in options or kind.backend in (None, CPU.backend):
        return options
    return {**options, "backend": f"cpu:{CPU.backend},{kind.name}:{kind.backend}"}


def count(kind: DeviceKind | str) -> int:
    """Return how many devices of the kind this machine has, without initialising them; 1 for the CPU."""
    return (kind_of(kind) if isinstance(kind, str) else kind).counter()


def device_for(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return the device of the process with this local rank.

    ACCELERATE_TORCH_DEVICE with an index wins. Processes that each see fewer devices than there are processes share
    out the visible ones, as with one CUDA_VISIBLE_DEVICES per process.
    """
    import torch

    wanted = requested()
    if wanted is not None and wanted.type == kind.name and wanted.index is not None:
        return wanted
    if not kind.indexed:
        return torch.device(kind.name)
    available = kind.counter()
    if available == 0:
        raise ValueError(f"no {kind.label} was found on this machine")
    return torch.device(kind.name, local_rank % available)


def use(device: torch.device) -> None:
    """Make an indexed device the current one of its runtime, which initialises it."""
    import torch

    if device.index is not None and kind_of(device.type).indexed:
        getattr(torch, device.type).set_device(device)


def is_initialized() -> list[str]:
    """Return the kinds whose torch runtime this process has initialised; a fork cannot use these any more."""
    import torch

    found = [name for name in ("cuda", "xpu") if _runtime_is_initialized(getattr(torch, name, None))]
    mps: Any = sys.modules.get("torch.mps")
    if mps is not None and getattr(mps, "_default_mps_generator", None) is not None:
        found.append("mps")
    bindings: Any = sys.modules.get("_XLAC")
    if bindings is not None and bindings._xla_runtime_is_initialized():
        found.append("xla")
    return found


def empty_cache(device: torch.device) -> None:
    """Give cached device memory back to the system."""
    import torch

    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "empty_cache"):
        module.empty_cache()


def _runtime_is_initialized(module: Any) -> bool:
    return module is not None and bool(module.is_initialized())


def share_of_cores(num_processes: int) -> int:
    """Return the CPU cores that each of `num_processes` processes of this node can have for itself, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_processes)
