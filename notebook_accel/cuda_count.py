"""Counts CUDA devices without starting NVIDIA's libraries in this process.

torch asks NVML for their number. With newer drivers (seen with 580) NVML opens the devices and starts a thread of CUDA
in the process that asks, which may not be forked from then on. So a copy of the process asks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import warnings
from typing import Final

from . import environ, interrupts

DRIVER: Final = "/dev/nvidiactl"
"""The file that is there where NVIDIA's driver is."""

_SECONDS: Final = 20.0  # a driver that starts takes several


def count() -> int | None:
    """Return the number of CUDA devices that torch can use in this process; None where the process may ask itself."""
    import torch

    if sys.platform != "linux" or environ.get("LOCAL_RANK") is not None or torch.cuda.is_initialized():
        return None  # a worker is going to use its device
    return None if _is_open() else _count_in_copy(environ.get("CUDA_VISIBLE_DEVICES"))


def _is_open() -> bool:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") == DRIVER:
                    return True
    return False


@functools.lru_cache(maxsize=16)
def _count_in_copy(visible: str | None) -> int | None:
    """Return what a forked process counts; None where it fails.

    Args:
        visible: CUDA_VISIBLE_DEVICES, on which the number depends.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    reader, writer = os.pipe()
    try:
        with interrupts.block_interrupt_in_children(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about any thread
            try:
                pid = os.fork()
            except OSError:
                return None
            if pid == 0:
                _tell_count(writer)
        os.close(writer)
        writer = -1
        return _read_count(reader, pid)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _tell_count(writer: int) -> None:
    """Write the number of devices, and end this process."""
    try:
        import torch

        warnings.simplefilter("ignore")
        os.write(writer, str(torch.cuda.device_count()).encode())
    finally:
        os._exit(0)


def _read_count(reader: int, pid: int) -> int | None:
    if sys.platform == "win32":
        raise NotImplementedError
    waiting = select.poll()
    waiting.register(reader, select.POLLIN)
    text = os.read(reader, 16) if waiting.poll(_SECONDS * 1000) else b""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # it has said all it has to say
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored, or other code has waited for it
        os.waitpid(pid, 0)
    return int(text) if text.isdigit() else None
