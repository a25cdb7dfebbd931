"""Libraries that import Accelerate give the same on a GPU with the take-over as with Accelerate."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import library_cases
from tests.gpu.conftest import Machine
from tests.notebooks.kernel import ROOT, Kernel

WITHIN = 150.0
NEEDED = ("accelerate", "transformers", "trl", "peft", "datasets")
OURS = ("-m", "notebook_accel", "launch", "--as-accelerate", "--num_processes", "1")
THEIRS = (
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc_per_node",
    "1",
)  # Trainer shards in nothing else
PROGRAM = Path(library_cases.__file__)
CELL = """
import notebook_accel
notebook_accel.take_over_accelerate()
import torch
from transformers import Trainer
from tests.libraries.trainer import parts
from pathlib import Path
def train():
    trainer = parts.make_trainer(Path("out"), use_cpu=False)
    trainer.train()
    return type(trainer.accelerator).__module__.split(".")[0], trainer.model.device.type, trainer.state.global_step
notebook_accel.notebook_launcher(train, num_processes=1, mixed_precision="bf16")
"""


def run(side: str, folder: Path) -> dict[str, Any]:
    """Run all cases on one side, and return what each gave."""
    folder.mkdir()
    words = [*OURS, *(["--cpu"] if library_cases.ON_CPU else [])] if side == "ours" else THEIRS
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(
        [sys.executable, *words, str(PROGRAM)],
        env={**os.environ, "PYTHONPATH": paths, "HF_HOME": str(folder), "TOKENIZERS_PARALLELISM": "false"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=False,
    )
    assert ended.returncode == 0, f"{side}:\n{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
    report: dict[str, Any] = json.loads((folder / "rank0.json").read_text())
    assert ("notebook_accel" in report["library"]) == (side == "ours"), report["library"]
    return report["cases"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> dict[str, dict[str, Any]]:
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    folder = tmp_path_factory.mktemp("libraries")
    return {side: run(side, folder / side) for side in ("ours", "theirs")}


def expect_same(ours: Any, theirs: Any, place: str) -> None:
    """Compare two reports; numbers may differ by what the order of sums on a GPU does."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), place
        for key in theirs:
            expect_same(ours[key], theirs[key], f"{place}/{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), place
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            expect_same(one, other, f"{place}/{number}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5), place
    else:
        assert ours == theirs, place


@pytest.mark.parametrize("case", library_cases.CASES)
def test_the_take_over_gives_what_accelerate_gives(found: dict[str, Any], case: str) -> None:
    expect_same(found["ours"][case], found["theirs"][case], case)
    assert case != "sharded" or found["theirs"][case]["whole"]["sharded"] is True
    shown = json.dumps(found["ours"][case])
    assert library_cases.ON_CPU or "cuda" in shown, shown


@pytest.mark.usefixtures("on_gpu")
def test_trainer_in_a_launched_function_uses_the_device(kernel: Kernel) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    cell = kernel.run(CELL).ok()
    assert cell.value == "('notebook_accel', 'cuda', 5)"
