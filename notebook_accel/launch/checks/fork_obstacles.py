"""What in this process forbids a fork of it.

A fork copies only one thread. So a forked worker cannot use a device runtime that this process has started, and it
hangs as soon as it uses more than one of OpenMP's threads. Thread pools of other libraries count as unsafe too. Threads
of Python and of ZeroMQ do no harm. Those of OpenBLAS do no harm either, because it starts new ones in the child.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ... import devices, probes, runtime
from . import cuda_use

_DEVICE_FILES: Final = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}
_HARMLESS: Final = ("ZMQ", "jemalloc", "pt_tcpstore")
"""How the names of threads start that a forked worker does not need: jemalloc, of pyarrow, prepares for forks."""
_SPINNING_SECONDS: Final = 0.1  # of CPU time of the thread
_WAITING_SECONDS: Final = 2.0

cuda_use.record()  # torch is here now, whatever was imported before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A reason why this process may not be forked.

    Attributes:
        what: what happened in this process, as a clause.
        cause: the import or cell line that did it first; empty if it is not known.
    """

    what: str
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.what}, first by {self.cause}" if self.cause else self.what


def reasons() -> list[Reason]:
    """Return the reasons why this process may not be forked; empty if it may be."""
    found = []
    initialized = devices.list_initialized()
    cause = describe_first_use(cuda_use.first_use.stack)
    for kind in initialized:
        if kind == "xla":  # torch_xla does not say where it was initialised
            found.append(Reason(what="the XLA runtime was initialised"))
        else:
            found.append(Reason(what=f"{kind.upper()} was initialised", cause=cause))
    if not initialized:
        found += [Reason(what=text, cause=cause) for text in find_open_devices()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found.append(Reason(what="a process group was made"))
    if _has_state():
        found.append(Reason(what="an Accelerator or PartialState was made"))
    if any(child.daemon for child in multiprocessing.active_children()):
        found.append(Reason(what="worker processes of a data loader or pool serve this process"))
    return found + [Reason(what=text) for text in find_native_threads()]


def _has_state() -> bool:
    """Return whether there is a run; Accelerate's own would be that of forks too, each of which would train alone."""
    theirs = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return runtime.current() is not None or bool(getattr(theirs, "_shared_state", None))


def describe_first_use(stack: Sequence[traceback.FrameSummary] | None) -> str:
    """Return the cell line that a stack comes from, and the import in it if an import made the call.

    Args:
        stack: frames, the outermost first; None without a stack.

    Returns:
        Such as `the import of model in cell In[3], line 1 (import model)`; empty without a stack.
    """
    if not stack:
        return ""
    cell = next((i for i in range(len(stack) - 1, -1, -1) if probes.is_cell(stack[i].filename)), None)
    below = stack[cell + 1 :] if cell is not None else stack
    imported = [frame for frame in below if frame.name == "<module>" and not frame.filename.startswith("<")]
    parts = []
    if imported and cell is not None:
        parts.append(f"the import of {_module_name(imported[0].filename)}")
    where = stack[cell] if cell is not None else stack[-1] if not imported else imported[0]
    line = (where.line or "").strip()
    place = f"{probes.describe_file(where.filename)}, line {where.lineno}" + (f" ({line})" if line else "")
    return " in ".join([*parts, place])


def find_native_threads() -> list[str]:
    """Return which threads of C libraries a forked worker would miss. Only Linux says; elsewhere the list is empty."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        return []
    known = {thread.native_id for thread in threading.enumerate()}
    own_name = Path("/proc/self/comm").read_text().strip()
    libraries: list[tuple[int, int, str]] | None = None
    for task in tasks.iterdir():
        if int(task.name) in known:
            continue
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # the thread has ended
        if name.startswith("pt_autograd"):
            return ["backward has used autograd's threads"]
        if name.startswith(_HARMLESS):
            continue
        if name != own_name:  # thread pools name their threads; OpenBLAS and OpenMP do not
            return [f"a library has threads of its own ({name})"]
        libraries = _find_libraries() if libraries is None else libraries
        if text := _check_thread(task, libraries):
            return [text]
    return []


def _check_thread(task: Path, libraries: list[tuple[int, int, str]]) -> str:
    """Return why a thread without a name forbids a fork; empty if it does not.

    An idle thread of OpenMP waits in code of libgomp. An idle thread of OpenBLAS spins for some time before it waits,
    and on a busy machine this takes long. So a thread that runs is looked at until it waits, or until it has used too
    much time to be idle.

    Args:
        task: its folder in /proc.
        libraries: OpenMP libraries as start address, end address and path.
    """
    started, deadline = _cpu_seconds(task), time.monotonic() + _WAITING_SECONDS
    while True:
        try:
            words = (task / "syscall").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return ""
        except OSError:
            return "there are threads of C libraries that the system does not let us look at"
        if words and words[0] != "running":
            break
        if _cpu_seconds(task) - started > _SPINNING_SECONDS or time.monotonic() > deadline:
            return "a thread of a C library is computing"
        time.sleep(0.002)
    counter = int(words[-1], 16)
    library = next((path for low, high, path in libraries if low <= counter < high), "")
    if "libgomp" in library or "libomp" in library or "libiomp" in library:
        return "CPU kernels have used OpenMP's threads (a matrix product or backward does)"
    return ""


def _cpu_seconds(task: Path) -> float:
    """Return the seconds of CPU time that a thread has used; 0 if the system does not say."""
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _find_libraries() -> list[tuple[int, int, str]]:
    """Return the loaded OpenMP libraries as start address, end address and path."""
    found = []
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/maps").read_text().splitlines():
            words = row.split(maxsplit=5)
            if len(words) == 6 and "omp" in words[5]:
                low, high = (int(text, 16) for text in words[0].split("-"))
                found.append((low, high, words[5]))
    return found


def find_open_devices() -> list[str]:
    """Return which device drivers this process has open.

    Other libraries than torch may have opened them. torch does so too where it only counts devices: always in
    `torch.cuda.is_available()`; in `torch.cuda.device_count()` where CUDA_VISIBLE_DEVICES names parts of a GPU (MIG),
    and with newer drivers, whose NVML opens them (seen with 580).
    """
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return [
        f"{name} was initialised by a library, or by counting devices, as torch.cuda.is_available() does"
        for path, name in _DEVICE_FILES.items()
        if path in found
    ]


def _module_name(filename: str) -> str:
    path = Path(filename)
    return path.parent.name if path.stem == "__init__" else path.stem
