"""CPU affinity: keep a process on the cores that are near its GPU."""

from __future__ import annotations

import math
import os
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Final

from . import devices, environ, probes

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_PCI: Final = Path("/sys/bus/pci/devices")


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Do what `override_numa_affinity` does, the first time that it is called with these arguments."""
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Let this process run on the cores of its GPU's NUMA node only; a warning says why where that cannot be.

    Cores that the process was not allowed before stay forbidden. CUDA is not initialised for it. The GPU's cores
    are asked of nvidia-ml-py where it is installed, otherwise of the driver's files; only NVIDIA GPUs on Linux have
    an answer.

    Args:
        local_process_index: rank on this node, which is the index of the GPU among the visible ones.
        verbose: print the cores; by default if ACCELERATE_DEBUG_MODE is set.
    """
    if isinstance(local_process_index, bool) or not isinstance(local_process_index, int):
        raise TypeError(f"local_process_index is an int, not {local_process_index!r}")
    if local_process_index < 0:
        raise ValueError(f"local_process_index {local_process_index} is negative")
    if verbose is None:
        verbose = environ.flag("ACCELERATE_DEBUG_MODE")
    cores = _cores_near(local_process_index)
    if isinstance(cores, str):
        warnings.warn(
            f"CPU affinity of process {local_process_index} is left as it is: {cores}", stacklevel=2
        )
        return
    if hasattr(os, "sched_setaffinity"):  # else there are no cores to set
        os.sched_setaffinity(0, cores)
    if verbose:
        print(f"process {local_process_index} runs on {len(cores)} cores: {_ranges(cores)}")


def _cores_near(index: int) -> set[int] | str:
    """Return the allowed cores near the GPU of a local rank, or the reason why they are not known."""
    if not hasattr(os, "sched_getaffinity"):
        return "this system does not let a process choose its cores"
    available = devices.count("cuda")
    if available == 0:
        return "no NVIDIA GPU was found"
    if index >= available:
        return f"there are {available} GPUs, and its index is {index}"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[index].strip() if visible else str(index)
    if name.startswith("MIG-"):
        return f"{name} is a part of a GPU, whose cores the driver does not tell"
    near = _ask_nvml(name) if probes.is_available("pynvml") else _ask_files(name)
    if isinstance(near, str):
        return near
    allowed = near & os.sched_getaffinity(0)
    return allowed or f"none of the cores near its GPU ({_ranges(near)}) is open to this process"


def _ask_nvml(name: str) -> set[int] | str:
    import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    try:
        if name.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(name)
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, math.ceil((os.cpu_count() or 1) / 64))
    except pynvml.NVMLError as error:
        return f"NVML on GPU {name}: {error}"
    finally:
        pynvml.nvmlShutdown()
    return {64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1}


def _ask_files(name: str, driver: Path = _DRIVER, pci: Path = _PCI) -> set[int] | str:
    """Return the cores near a GPU, named by its index in PCI order or by its UUID."""
    gpus = sorted(driver.iterdir()) if driver.is_dir() else []
    if name.isdigit():
        found = gpus[int(name) : int(name) + 1]
    else:
        found = [gpu for gpu in gpus if f"{name}\n" in (gpu / "information").read_text(encoding="utf-8")]
    if not found or not (cores := pci / found[0].name.lower() / "local_cpulist").is_file():
        return f"the driver's files do not tell where GPU {name} is: pip install nvidia-ml-py"
    return parse_cores(cores.read_text(encoding="utf-8"))


def parse_cores(text: str) -> set[int]:
    """Return the numbers of a list such as `0-3,8`; ValueError for another text."""
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of cores such as '0-3,8'")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cores


def _ranges(cores: set[int]) -> str:
    """Write core numbers as `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][-1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
