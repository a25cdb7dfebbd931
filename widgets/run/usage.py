"""Memory and load of each rank, looked at from the notebook's side."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psutil

from .picture import Usage

_INTERVAL: Final = 1.0


class Meter:
    """Looks at processes and devices, once a second at most.

    GPUs are asked through NVML, where the package nvidia-ml-py is installed and a driver answers.
    """

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._last: dict[int, Usage] = {}
        self._next = 0.0
        self._cards: _Cards | None = None

    def read(self, pids: Mapping[int, int], devices: Sequence[str] = ()) -> Mapping[int, Usage]:
        """Return what each rank uses, or used when it was last seen.

        Args:
            pids: process ids by rank.
            devices: the CUDA devices of this node's ranks, in the order of ranks, as CUDA_VISIBLE_DEVICES names them.
        """
        now = time.monotonic()
        if now < self._next or not pids:
            return self._last
        self._next = now + _INTERVAL
        if devices and self._cards is None:
            self._cards = _Cards()
        found = dict(self._last)
        for place, (rank, pid) in enumerate(sorted(pids.items())):
            seen = self._look(pid)
            if seen is None:
                continue
            memory, cpu = seen
            card = devices[place] if place < len(devices) else None
            device_memory, device = (
                self._cards.read(card, pid) if self._cards is not None and card is not None else (None, None)
            )
            found[rank] = Usage(memory=memory, cpu=cpu, device_memory=device_memory, device=device)
        self._last = found
        return found

    def close(self) -> None:
        """Let go of the driver."""
        if self._cards is not None:
            self._cards.close()
            self._cards = None

    def _look(self, pid: int) -> tuple[int, float | None] | None:
        """Return a process's memory and load, None where it has ended; the first look knows no load."""
        known = pid in self._processes
        try:
            process = self._processes.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                cpu = process.cpu_percent()
                memory = int(process.memory_info().rss)
        except psutil.Error:
            return None
        return (
            (memory, cpu if known else None) if memory else None
        )  # nothing is left of one that nobody waited for


class _Cards:
    """NVIDIA's GPUs, as their driver tells of them."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]

            pynvml.nvmlInit()
        except ImportError:
            return
        except (
            Exception
        ) as error:  # its error class is the package's own; without a driver there is nothing to show
            if type(error).__name__.startswith("NVML"):
                return
            raise
        self._nvml = pynvml

    def read(self, device: str, pid: int) -> tuple[int | None, float | None]:
        """Return the bytes that a process holds on a device (in a container: that all do), and its load."""
        nvml = self._nvml
        if nvml is None:
            return None, None
        try:
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(device))
                if device.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(device)
            )
            own = [
                entry.usedGpuMemory
                for entry in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                if entry.pid == pid and entry.usedGpuMemory
            ]
            memory = own[0] if own else nvml.nvmlDeviceGetMemoryInfo(handle).used
            return int(memory), float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except nvml.NVMLError:
            return None, None

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
