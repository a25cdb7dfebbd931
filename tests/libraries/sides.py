"""Runs a script of `scripts` on Accelerate and on the take-over, in one and in two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
LAUNCH = ["-m", "notebook_accel", "launch", "--cpu", "--as-accelerate", "--num_processes"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
RUNS = {"ours2": [*LAUNCH, "2"], "theirs2": TORCHRUN, "ours1": [*LAUNCH, "1"], "theirs1": []}
SECONDS = 400
LAST_SECONDS = 40

Outcomes = dict[str, list[dict[str, Any]]]
"""What each process of each run gave, by the names of the runs."""


def run(script: str, folder: Path, name: str) -> list[dict[str, Any]]:
    """Run a script in as many processes as the run's name ends with, and return what each wrote.

    Args:
        script: its name in `scripts`, without `.py`.
        folder: where it runs; the runs of a script have folders of their own in it.
        name: a key of `RUNS`.
    """
    words = [*RUNS[name], str(SCRIPTS / f"{script}.py")]
    own_folder = make_folder(folder / name)
    try:
        call(words, {"TRACKIO_DIR": str(own_folder / "trackio")}, own_folder)
    except AssertionError:
        if name != "theirs2":
            raise
        # gloo now and then breaks the connection of two processes that the reference runs in
        own_folder = make_folder(folder / f"{name}-again")
        call(words, {"TRACKIO_DIR": str(own_folder / "trackio")}, own_folder)
    return [json.loads((own_folder / f"rank{rank}.json").read_text()) for rank in range(int(name[-1]))]


def make_folder(path: Path) -> Path:
    """Make a folder, and return it."""
    path.mkdir()
    return path


def call(words: Sequence[str], own: Mapping[str, str], folder: Path) -> None:
    """Run Python to its end, which has to be a good one; the error has all output.

    Args:
        words: after `python`.
        own: variables.
        folder: where it runs.
    """
    unset = ("ACCELERATE_", "NOTEBOOK_ACCEL_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(unset)}
    variables = {
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **own,
    }
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], env={**kept, **variables}, cwd=folder, stdout=file, stderr=file
        )
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # a launcher ends its processes then; a kill would leave them
            try:
                process.wait(LAST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    assert process.returncode == 0, f"it ended with {process.returncode}:\n{output.read_text()[-8000:]}"


def run_all(script: str, folder: Path, names: tuple[str, ...] = tuple(RUNS)) -> Outcomes:
    """Run a script as often as there are names of runs, two at a time.

    Args:
        script: see `run`.
        folder: see `run`.
        names: keys of `RUNS`.
    """
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(lambda name: run(script, folder, name), names), strict=True))


def compare(done: Outcomes, number: int, case: str) -> list[Any]:
    """Check that a case did the same on both sides, but for `own`, and return what it gave in each process.

    Args:
        done: what `run_all` returned.
        number: of processes.
        case: a name among the script's cases.
    """
    ours, theirs = done[f"ours{number}"], done[f"theirs{number}"]
    assert all("notebook_accel" in report["library"] for report in ours)
    assert not any("notebook_accel" in report["library"] for report in theirs)
    found = [[dict(report["cases"][case]) for report in side] for side in (ours, theirs)]
    own = [[report.pop("own", {}) for report in side] for side in found]
    assert found[0] == found[1]
    return [{**report, **more} for report, more in zip(found[0], own[0], strict=True)]
