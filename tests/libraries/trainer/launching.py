"""Launches the cases of Trainer with this package and with Accelerate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = ["-m", "notebook_accel", "launch", "--cpu", "--as-accelerate", "--num_processes"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
RUNS = {"ours1": [*LAUNCH, "1"], "theirs1": [], "ours2": [*LAUNCH, "2"], "theirs2": TORCHRUN}
UNSET = ("ACCELERATE_", "NOTEBOOK_ACCEL_", "RANK", "WORLD_SIZE", "LOCAL_RANK")

Results = list[dict[str, dict[str, dict[str, Any]]]]
"""For each rank what the cases of each module found."""


def launch(folder: Path, name: str, *modules: str, attempts: int = 1) -> Results:
    """Run the cases of modules as `RUNS` says, and return what they found.

    Args:
        folder: for all files.
        name: of the run; it ends with the number of processes.
        modules: of cases, in this folder.
        attempts: how often it may be tried.
    """
    place = folder / f"{name}-{attempts}"
    place.mkdir()
    own = {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    kept = {key: text for key, text in os.environ.items() if not key.startswith(UNSET)}
    done = subprocess.run(
        [sys.executable, *RUNS[name], "-m", "tests.libraries.trainer.run_cases", str(place), *modules],
        env={**kept, **own, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"},
        cwd=place,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode != 0 and attempts > 1:
        return launch(folder, name, *modules, attempts=attempts - 1)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = [json.loads((place / f"{rank}.json").read_text()) for rank in range(int(name[-1]))]
    assert all(("notebook_accel" in rank["library"]) is name.startswith("ours") for rank in found)
    return [rank["cases"] for rank in found]
