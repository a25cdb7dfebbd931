"""The systems that this package believes to run on in the kernels of tests/notebooks, where a variable names one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

VARIABLE: Final = "NOTEBOOK_ACCEL_TEST_SYSTEM"
STARTUP: Final = Path(__file__).parent / "startup"
SYSTEM: Final = os.environ.get(VARIABLE, "")
"""`darwin`, empty for the one that this is."""

if SYSTEM not in ("", "darwin"):
    raise ValueError(f"{VARIABLE}={SYSTEM}: darwin is known")


BELIEVED: Final = SYSTEM or sys.platform
"""The system for the kernels: that one, or this."""


def make_path(*folders: str | Path) -> str:
    """Return a PYTHONPATH with these folders, for programs that are to believe in `SYSTEM`."""
    return os.pathsep.join(str(folder) for folder in (*folders, *([STARTUP] if SYSTEM else [])) if folder)
