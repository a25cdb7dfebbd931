"""CPU affinity: keeps a process on the cores near its GPU."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from pathlib import Path
from typing import Final

from . import devices, environ, probes
from .caller import warn

_DRIVER: Final = Path("/proc/driver/nvidia/gpus")
_PCI: Final = Path("/sys/bus/pci/devices")


@cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity`; a second call with the same arguments does nothing.

    Args:
        local_process_index: see `override_numa_affinity`.
        verbose: see `override_numa_affinity`.
    """
    override_numa_affinity(local_process_index, verbose)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Restrict this process to the cores of its GPU's NUMA node; a warning gives the reason where it cannot.

    The process gets no cores that it was not allowed before. CUDA is not initialised. nvidia-ml-py knows the cores, and
    without it the driver's files; this works for NVIDIA GPUs on Linux only.

    Args:
        local_process_index: rank on this node. Visible GPUs are given out to the ranks in turn, so that a process that
            sees one GPU has that one.
        verbose: print the cores; by default only if ACCELERATE_DEBUG_MODE is set.

    Raises:
        TypeError: the index is no integer.
        ValueError: the index is negative.
    """
    if isinstance(local_process_index, bool) or not isinstance(local_process_index, int):
        raise TypeError(f"local_process_index is an int, not {local_process_index!r}")
    if local_process_index < 0:
        raise ValueError(f"local_process_index {local_process_index} is negative")
    if verbose is None:
        verbose = environ.flag("ACCELERATE_DEBUG_MODE")
    cores = _find_cores(local_process_index)
    if isinstance(cores, str):
        warn(f"CPU affinity of process {local_process_index} is left as it is: {cores}")
        return
    if hasattr(os, "sched_setaffinity"):  # other systems have no such call
        os.sched_setaffinity(0, cores)
    if verbose:
        print(f"process {local_process_index} runs on {len(cores)} cores: {_format_ranges(cores)}")


def _find_cores(index: int) -> set[int] | str:
    """Return the allowed cores near the GPU of a local rank, or a sentence that says why they are unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return "this system does not let a process choose its cores"
    available = devices.count("cuda")
    if available == 0:
        return "no NVIDIA GPU was found"
    place = index % available  # as `devices.device_for` gives them out
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[place].strip() if visible else str(place)
    if name.startswith("MIG-"):
        return f"{name} is a part of a GPU, whose cores the driver does not tell"
    near = _ask_nvml(name) if probes.is_available("pynvml") else _ask_files(name)
    if isinstance(near, str):
        return near
    allowed = near & os.sched_getaffinity(0)
    return allowed or f"none of the cores near its GPU ({_format_ranges(near)}) is open to this process"


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
    """Return the core numbers of a list such as `0-3,8`.

    Args:
        text: from a file of the system.

    Raises:
        ValueError: it is no such list.
    """
    cores: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of cores such as '0-3,8'")
        cores.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cores


def _format_ranges(cores: set[int]) -> str:
    """Return core numbers as text: `0-3,8`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][-1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
