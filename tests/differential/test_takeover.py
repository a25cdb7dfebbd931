"""Hugging Face's Trainer, unchanged, on this package and on Accelerate: it trains, evaluates and resumes alike."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import forker
from tests.differential.test_scripts import READ_BY_TORCH, WITHOUT_SLOW

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (Path(__file__).parent / "trainer_whole_script.txt").read_text()
LAUNCH = ["-m", "notebook_accel", "launch", "--cpu", "--as-accelerate", "--num_processes"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
RUNS = {"ours1": [*LAUNCH, "1"], "theirs1": [], "ours2": [*LAUNCH, "2"], "theirs2": TORCHRUN}


def run(folder: Path, name: str) -> list[dict[str, Any]]:
    """Run the script on as many processes as the name ends with, and return what each wrote."""
    unset = ("ACCELERATE_", "NOTEBOOK_ACCEL_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {key: text for key, text in os.environ.items() if not key.startswith(unset)}
    own = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder), "ACCELERATE_USE_CPU": "true"}
    done = forker.run(
        [sys.executable, *RUNS[name], "train.py", name],
        env={**kept, **READ_BY_TORCH, **own},
        cwd=folder,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(int(name[-1]))]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What all runs wrote, by their names, two runs at a time."""
    folder = tmp_path_factory.mktemp("takeover")
    (folder / "train.py").write_text(WITHOUT_SLOW + SCRIPT)
    with forker.session({**os.environ, **READ_BY_TORCH}), ThreadPoolExecutor(2) as pool:
        return dict(zip(RUNS, pool.map(lambda name: run(folder, name), RUNS), strict=True))


@pytest.mark.parametrize("number", [1, 2])
def test_trainer_does_the_same(number: int, done: dict[str, list[dict[str, Any]]]) -> None:
    ours, theirs = done[f"ours{number}"], done[f"theirs{number}"]
    assert all("notebook_accel" in report["library"] for report in ours)
    assert not any("notebook_accel" in report["library"] for report in theirs)
    assert [report["found"] for report in ours] == [report["found"] for report in theirs]


@pytest.mark.parametrize("number", [1, 2])
def test_it_has_trained_one_model_on_all_processes(
    number: int, done: dict[str, list[dict[str, Any]]]
) -> None:
    found = done[f"ours{number}"][-1]["found"]
    losses = [entry["loss"] for entry in found["log"] if "loss" in entry]
    assert found["world"] == number and len(losses) > 5
    assert (found["wrapped"] == "DistributedDataParallel") is (number == 2)
    assert found["evaluated"][0]["eval_samples"] == 61 and found["best"].startswith("checkpoint-")
    steps = {entry["step"]: entry["loss"] for entry in found["log"] if "loss" in entry}
    again = {entry["step"]: entry["loss"] for entry in found["resumed"] if "loss" in entry}
    assert again.keys() == steps.keys()
