"""Launches on fake devices from a Python that loads them with torch, as it loads a maker's package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.structure.source import ROOT

_ENTRY = "[torch.backends]\nfake = tests.unit.fake_launches:load\n"


def load() -> None:
    """Install the devices; torch calls this at the end of its import."""
    from tests.unit import fake_device, fake_group

    fake_group.install(fake_device.install(count=int(os.environ.get("FAKE_COUNT", "2"))))


def run_script(folder: Path, text: str, *arguments: str, **variables: str) -> Any:
    """Run a script in a fresh process, and return what its last line of output has as JSON.

    Args:
        folder: for the script and the entry point of the devices.
        text: of the script.
        arguments: of Python, in front of the script.
        variables: of the environment.
    """
    if not hasattr(torch._C, "_acc"):
        pytest.skip(f"torch {torch.__version__} takes no device made in Python")
    info = folder / "fake-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_ENTRY)
    script = folder / "scripts" / "script.py"  # where an agent finds no module
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ZE_AFFINITY_MASK": "",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, *arguments, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
