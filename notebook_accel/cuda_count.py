"""Counts CUDA devices without starting NVIDIA's libraries in a kernel.

torch asks NVML for their number. With newer drivers (seen with 580) NVML opens the devices and starts a thread of CUDA
in the process that asks, which then counts as one that may not be forked. So a copy of the kernel asks.
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

from . import environ, interrupts, probes

DRIVER: Final = "/dev/nvidiactl"
"""The file that is there where NVIDIA's driver is."""

_SECONDS: Final = 20.0  # a driver that starts takes several


def count() -> int | None:
    """Return the number of CUDA devices that torch can use in this process.

    Returns:
        None where this process may as well ask itself: it is no kernel, or has opened the devices. Also where the copy
        finds none, or does not answer.
    """
    import torch

    if sys.platform != "linux" or probes.find_kernel_shell() is None or sys.gettrace() is not None:
        return None
    if torch.cuda.is_initialized() or _is_open():
        return None
    try:
        return _count_in_copy(environ.get("CUDA_VISIBLE_DEVICES"))
    except LookupError:
        return None


def _is_open() -> bool:
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") == DRIVER:
                    return True
    return False


@functools.lru_cache(maxsize=16)
def _count_in_copy(visible: str | None) -> int:
    """Return what a forked process counts.

    Args:
        visible: CUDA_VISIBLE_DEVICES, on which the number depends.

    Raises:
        LookupError: it finds none, or fails. The next call tries again.
    """
    pid, text = 0, b""
    ends = os.pipe()
    with open(ends[0], "rb", buffering=0) as reader, open(ends[1], "wb", buffering=0) as writer:
        try:
            with interrupts.block_interrupt_in_children(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Python 3.12 and of other libraries, about any thread
                pid = os.fork()
                if pid == 0:
                    _tell_count(writer.fileno())
            writer.close()  # the end of the copy ends what can be read
            waiting = select.poll()
            waiting.register(reader, select.POLLIN)
            text = (reader.read(16) or b"") if waiting.poll(_SECONDS * 1000) else b""
        except OSError as error:
            raise LookupError(str(error)) from error
        finally:
            if pid:
                _end(pid)
    if not text.isdigit() or int(text) == 0:
        raise LookupError(text)
    return int(text)


def _tell_count(writer: int) -> None:
    """Write the number of devices, and end this process."""
    try:
        import torch

        os.write(writer, str(torch.cuda.device_count()).encode())
    finally:
        os._exit(0)


def _end(pid: int) -> None:
    """End a process of which nothing more is needed."""
    # without a child of this number SIGCHLD is ignored, or other code has waited for it
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
