"""Whether this process may be forked: what was used in it that a forked worker could not use again.

A device runtime does not survive a fork. OpenMP's threads do not either: a child that uses more than one hangs.
Other libraries' pools are taken to be no better. Threads of Python and of ZeroMQ do no harm, nor do OpenBLAS's, which
are made again in the child.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from .. import devices, runtime

_CELL: Final = re.compile(r"ipykernel_\d+|<ipython-input-|<string>")
_DEVICE_FILES: Final = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}
_HARMLESS: Final = ("ZMQ", "pt_tcpstore")  # names of threads that a forked worker has no use for
_SPINNING_SECONDS: Final = 0.1  # of its own CPU time
_WAITING_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why this process may not be forked; `culprit` is the import or cell line that caused it, where known."""

    what: str
    culprit: str = ""

    def __str__(self) -> str:
        return f"{self.what}, first by {self.culprit}" if self.culprit else self.what


class _FirstUse:
    """Remembers where a device was first initialised."""

    def __init__(self) -> None:
        self.stack: traceback.StackSummary | None = None
        self.pid = os.getpid()

    def __call__(self) -> None:
        if self.stack is None:
            self.stack = traceback.extract_stack()


_first_use = _FirstUse()


def watch() -> None:
    """Let torch tell where CUDA is first initialised: it calls what is queued here at that moment."""
    if not torch.cuda.is_initialized():
        with contextlib.suppress(AttributeError):
            torch.cuda._lazy_call(_first_use)


def reasons() -> list[Reason]:
    """Return why this process may not be forked; empty where it may."""
    found = []
    initialized = devices.is_initialized()
    culprit = describe_first_use(_first_use.stack)
    for kind in initialized:
        seen = kind != "xla"  # its runtime does not tell
        what = f"{kind.upper()} was initialised" if seen else "the XLA runtime was initialised"
        found.append(Reason(what=what, culprit=culprit if seen else ""))
    if not initialized:
        found += [Reason(what=text, culprit=culprit) for text in _open_devices()]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        found.append(Reason(what="a process group was made"))
    if runtime.current() is not None:
        found.append(Reason(what="an Accelerator or PartialState was made"))
    return found + [Reason(what=text) for text in native_threads()]


def describe_first_use(stack: Sequence[traceback.FrameSummary] | None) -> str:
    """Return the cell line, and the import where one did it, that a stack shows; empty without a stack."""
    if not stack:
        return ""
    cell = next((i for i in range(len(stack) - 1, -1, -1) if _CELL.search(stack[i].filename)), None)
    below = stack[cell + 1 :] if cell is not None else stack
    imported = [frame for frame in below if frame.name == "<module>" and not frame.filename.startswith("<")]
    parts = []
    if imported and cell is not None:
        parts.append(f"the import of {_module_name(imported[0].filename)}")
    where = stack[cell] if cell is not None else stack[-1] if not imported else imported[0]
    line = (where.line or "").strip()
    place = f"{place_of(where.filename)}, line {where.lineno}" + (f" ({line})" if line else "")
    return " in ".join([*parts, place])


def native_threads() -> list[str]:
    """Say which threads of C libraries a forked worker would miss; empty where none or not on Linux."""
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
            continue  # it has ended
        if name.startswith("pt_autograd"):
            return ["backward has used autograd's threads"]
        if name.startswith(_HARMLESS):
            continue
        if name != own_name:  # a pool gives its threads names; OpenBLAS and OpenMP do not
            return [f"a library has threads of its own ({name})"]
        libraries = _libraries() if libraries is None else libraries
        if text := _thread_problem(task, libraries):
            return [text]
    return []


def _thread_problem(task: Path, libraries: list[tuple[int, int, str]]) -> str:
    """Say what an unnamed thread is: an idle one of OpenMP waits inside libgomp itself.

    An idle one of OpenBLAS spins a while before it waits; on a busy machine it gets to that late.
    """
    started, deadline = _cpu_seconds(task), time.monotonic() + _WAITING_SECONDS
    while True:
        try:
            words = (task / "syscall").read_text().split()
        except FileNotFoundError:
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
    """Return the CPU time that a thread has used, 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0.0
    try:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _libraries() -> list[tuple[int, int, str]]:
    found = []
    with contextlib.suppress(OSError):
        for row in Path("/proc/self/maps").read_text().splitlines():
            words = row.split(maxsplit=5)
            if len(words) == 6 and "omp" in words[5]:
                low, high = (int(text, 16) for text in words[0].split("-"))
                found.append((low, high, words[5]))
    return found


def _open_devices() -> list[str]:
    """Say which device drivers this process has open, whoever opened them."""
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return [f"{name} was initialised outside torch" for path, name in _DEVICE_FILES.items() if path in found]


def is_cell(filename: str) -> bool:
    """Whether code of this name is a cell's."""
    return bool(_CELL.search(filename))


def place_of(filename: str) -> str:
    """Return `cell In[3]` for a cell's file, else the file."""
    if not _CELL.search(filename):
        return filename
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return f"cell In[{numbers[filename]}]" if filename in numbers else "a cell"


def _module_name(filename: str) -> str:
    path = Path(filename)
    return path.parent.name if path.stem == "__init__" else path.stem
