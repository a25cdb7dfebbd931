"""Runs the command in a process of its own, beside a folder of configs that a test has to itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import forker
from tests.structure.source import ROOT


def run(
    folder: Path, *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it.

    Args:
        folder: of the configs.
        arguments: its words.
        cwd: its working folder, None for that of this process.
        variables: what its environment has besides.
    """
    return forker.run(
        [sys.executable, "-m", "notebook_accel", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        cwd=cwd,
        timeout=240,
    )


def config_of(folder: Path, text: str) -> Path:
    path = folder / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path
