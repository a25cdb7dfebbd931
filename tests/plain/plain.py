"""The environment of `make test-plain`: torch and the wheel of this package, and those of extras that lie over it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.structure.source import ROOT

PLAIN = ROOT / ".venv-plain"


def find_python(folder: Path = PLAIN) -> str:
    """Return the Python of an environment, and skip the test where that was not made."""
    if not (folder / "stamp").exists():
        pytest.skip(f"needs {folder.relative_to(ROOT)}: make test-plain")
    return str(folder / "bin" / "python")


def run(
    folder: Path, *words: str, python: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program where nothing of this repository is on the path.

    Args:
        folder: where it runs, and where configs are looked for.
        words: for Python.
        python: that of `find_python`, if None.
        variables: of the environment, besides.
    """
    environment = {**os.environ, "PYTHONPATH": "", "HF_HOME": str(folder), "ACCELERATE_USE_CPU": "true"}
    return subprocess.run(
        [python or find_python(), *words],
        cwd=folder,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
