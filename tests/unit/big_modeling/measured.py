"""How much memory a piece of work takes at most, read from Linux's /proc; and programs that measure themselves."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.structure.source import ROOT

_MMAP_THRESHOLD = -3  # glibc's M_MMAP_THRESHOLD


def reset_peak() -> int:
    """Forget the peak of resident memory, and return what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak_above(before: int) -> int:
    """Return by how many bytes the peak since `reset_peak` is above what was resident before."""
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return a number of bytes of this process, such as `VmRSS`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def free_at_once() -> None:
    """Have this process give freed memory of tensors back to the system at once."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 65536)


def run_program(module: str, *arguments: object) -> dict[str, Any]:
    """Run a module in a new Python, and return the JSON that it printed last."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
