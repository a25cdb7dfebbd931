"""`notebook-accel launch --tpu` on torch_xla's runtime, which computes on the CPU here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, sys, torch
left_open = open("file", "w")
left_open.write("kept")
total = (torch.ones(2, device="xla") + 1).sum().item()
print(total, os.environ["RANK"], os.environ["WORLD_SIZE"], __name__, sys.argv[1:])
if sys.argv[1:]:
    raise ValueError("bad batch")
"""


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "s.py").write_text(SCRIPT)
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT), "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "notebook_accel", "launch", "--tpu", "s.py", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_script_runs_on_xla_devices(tmp_path: Path) -> None:
    done = launch(tmp_path)
    assert (done.returncode, done.stdout) == (0, "4.0 0 1 __main__ []\n"), done.stderr
    assert (tmp_path / "file").read_text() == "kept"


def test_its_error_is_shown_with_its_own_lines(tmp_path: Path) -> None:
    done = launch(tmp_path, "fail")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[1].startswith(
        f'  File "{tmp_path / "s.py"}", line 8'
    )
    assert "ValueError: bad batch" in lines
    assert lines[-1].startswith("notebook-accel: rank 0 (local rank 0, process ")
