"""Measures memory and load of each rank, from the notebook's process, and keeps what was measured."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psutil

from notebook_accel.stream.series import Point, Series

from .picture import Usage

_INTERVAL: Final = 1.0
_MOST_LINES: Final = 8  # of ranks; of more the most, the mean and the least are kept
_MOST_POINTS: Final = 600
_QUANTITIES: Final = {
    "memory (MiB)": ("memory", 1 / 2**20),
    "CPU (%)": ("cpu", 1.0),
    "GPU memory (MiB)": ("device_memory", 1 / 2**20),
    "GPU (%)": ("device", 1.0),
}
"""What is kept: the attribute of `Usage`, and by what it is multiplied."""


class History:
    """What ranks have used since their run began."""

    def __init__(self) -> None:
        self._series: dict[str, dict[str, Series]] = {}
        self._has_many = False

    def add(self, usage: Mapping[int, Usage], moment: float) -> None:
        """Add what was measured at one moment.

        Args:
            usage: by rank.
            moment: in seconds since the epoch.
        """
        if len(usage) > _MOST_LINES and not self._has_many:
            self._has_many = True
            self._series.clear()  # what there is of the first ranks is not of all
        for quantity, (name, factor) in _QUANTITIES.items():
            values = {rank: getattr(one, name) for rank, one in usage.items()}
            known = {rank: value * factor for rank, value in values.items() if value is not None}
            for line, value in self._name_lines(known).items():
                series = self._series.setdefault(line, {}).setdefault(quantity, Series(_MOST_POINTS))
                series.add(Point(None, moment, value))

    def _name_lines(self, values: Mapping[int, float]) -> dict[str, float]:
        if not self._has_many:
            return {f"rank {rank}": value for rank, value in values.items()}
        numbers = list(values.values())
        return (
            {"most": max(numbers), "mean": sum(numbers) / len(numbers), "least": min(numbers)}
            if numbers
            else {}
        )

    def read(self) -> Mapping[str, Mapping[str, tuple[Point, ...]]]:
        """Return the points of each quantity, by the line that they belong to: a rank, or the most of many."""
        return {
            line: {quantity: tuple(series) for quantity, series in quantities.items()}
            for line, quantities in self._series.items()
        }


class Meter:
    """Measures processes and devices, at most once a second.

    GPUs are measured through NVML, if the package nvidia-ml-py is installed and a driver answers.

    Attributes:
        history: what it has measured so far.
    """

    def __init__(self) -> None:
        self.history = History()
        self._processes: dict[int, psutil.Process] = {}
        self._last: dict[int, Usage] = {}
        self._next = 0.0
        self._nvml: _Nvml | None = None

    def read(self, pids: Mapping[int, int], devices: Sequence[str] = ()) -> Mapping[int, Usage]:
        """Return what each rank uses now. For a rank that has ended it is what it used last.

        Args:
            pids: process ids by rank.
            devices: the CUDA devices of the ranks on this node, in the order of ranks, as in CUDA_VISIBLE_DEVICES.

        Returns:
            The usage by rank, for each rank that was measured at least once.
        """
        now = time.monotonic()
        if now < self._next or not pids:
            return self._last
        self._next = now + _INTERVAL
        if devices and self._nvml is None:
            self._nvml = _Nvml()
        found: dict[int, Usage] = {}
        for place, (rank, pid) in enumerate(sorted(pids.items())):
            measured = self._measure(pid)
            if measured is None:
                continue
            memory, cpu = measured
            gpu = devices[place] if place < len(devices) else None
            device_memory, device = (
                self._nvml.read(gpu, pid) if self._nvml is not None and gpu is not None else (None, None)
            )
            found[rank] = Usage(memory=memory, cpu=cpu, device_memory=device_memory, device=device)
        self.history.add(found, time.time())
        self._last = {**self._last, **found}
        return self._last

    def close(self) -> None:
        """Close the connection to the driver."""
        if self._nvml is not None:
            self._nvml.close()
            self._nvml = None

    def _measure(self, pid: int) -> tuple[int, float | None] | None:
        """Return memory and load of a process; None if it has ended. The first time the load is None."""
        known = pid in self._processes
        try:
            process = self._processes.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                cpu = process.cpu_percent()
                memory = int(process.memory_info().rss)
        except psutil.Error:
            return None
        if not memory:
            return None  # a zombie: it has ended, and its parent has not read its exit code yet
        return memory, cpu if known else None


class _Nvml:
    """NVIDIA's library that asks the driver about GPUs."""

    def __init__(self) -> None:
        self._library: Any = None
        try:
            import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]

            pynvml.nvmlInit()
        except ImportError:
            return
        except (
            Exception
        ) as error:  # NVMLError is a class of the package: without a driver there is nothing to show
            if type(error).__name__.startswith("NVML"):
                return
            raise
        self._library = pynvml

    def read(self, device: str, pid: int) -> tuple[int | None, float | None]:
        """Return memory and load of a device; None for what is not known.

        Args:
            device: its number or UUID, as in CUDA_VISIBLE_DEVICES.
            pid: process id.

        Returns:
            The bytes that the process uses on the device, and the load of the device in percent. In a container the
            driver does not know the process: then the bytes are those of all processes.
        """
        nvml = self._library
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
        if self._library is not None:
            self._library.nvmlShutdown()
            self._library = None
