"""Hugging Face's Trainer in a cell: one model on two processes, its bars and log lines, its report as the value."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks.kernel import ROOT, Cell, Kernel

pytestmark = [
    pytest.mark.notebook,
    pytest.mark.slow,
    pytest.mark.once,
    *(
        # an import would take this process seconds, even where these tests are not chosen
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("accelerate", "transformers")
    ),
]

SCRIPT = (ROOT / "tests" / "differential" / "trainer_script.txt").read_text()
# Trainer's Accelerator imports DeepSpeed to look at the model, for seconds: here in fresh processes only
WITHOUT_DEEPSPEED = "import sys\nsys.modules['deepspeed'] = None\n"
SETUP = (
    WITHOUT_DEEPSPEED + SCRIPT.partition("if __name__")[0] + "from notebook_accel import notebook_launcher\n"
)
STEPS = 256 // (2 * 8) * 4


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has defined `train`."""
    folder = tmp_path_factory.mktemp("trainer")
    quiet = {"DS_ACCELERATOR": "cpu"}  # else DeepSpeed, where it is installed, says what it found
    started = Kernel(folder, HF_HOME=str(folder), CUDA_VISIBLE_DEVICES="", **quiet)
    started.run(SETUP).ok()
    yield started
    started.close()


def reports(cell: Cell) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ast.literal_eval(cell.value)
    return found


def test_a_cell_trains_one_model(trainer: Kernel) -> None:
    cell = trainer.run("notebook_launcher(train, num_processes=2, returns='all')").ok()
    first, second = reports(cell)
    expected = {"kind": "MULTI_CPU", "backend": "gloo", "world": 2, "wrapped": "DistributedDataParallel"}
    assert expected.items() <= first.items() and first["steps"] == STEPS
    assert first["weights"] == second["weights"] and (first["rank"], second["rank"]) == (0, 1)
    assert first["losses"][-1] < first["losses"][0] / 2
    assert "OMP_NUM_THREADS" not in cell.stderr, "Accelerate chose threads by itself"


@pytest.mark.not_on("darwin", "Trainer takes forks alone for notebooks")
def test_one_table_with_a_bar_stands_in_the_cell(trainer: Kernel) -> None:
    cell = trainer.run("notebook_launcher(train, num_processes=2, output='first')").ok()
    (table,) = cell.displays
    assert f"[{STEPS}/{STEPS} " in table["text/html"] and "<th>Training Loss</th>" in table["text/html"]
    assert table["text/html"].count("<tr>") == STEPS // 8
    updates = [output for output in cell.outputs if output["type"] == "update_display_data"]
    assert len(updates) > 4, "it moved while the processes trained"
    assert cell.lines == []


def test_fresh_processes_show_lines_and_a_bar(trainer: Kernel) -> None:
    """Trainer takes them for no notebook: it prints what it logs, once, and tqdm draws the bar."""
    launch = "notebook_launcher(train, num_processes=2, start_method='fresh')"
    cell = trainer.run(launch).ok()
    logged = [line for line in cell.lines if "'loss'" in line]
    assert len(logged) == STEPS // 8 and all(line.startswith("[0] {'loss'") for line in logged)
    (bar,) = cell.displays
    assert f"{STEPS}/{STEPS}" in bar["text/plain"] and "100%" in bar["text/plain"]
    assert "it/s" not in cell.stderr, "the bar is not among the error output"


def test_a_config_reaches_trainer(trainer: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "num_processes: 2\nuse_cpu: true\nmixed_precision: bf16\ngradient_accumulation_steps: 2\n"
    )
    cell = trainer.run(f"notebook_launcher(train, output='none', config={str(path)!r})").ok()
    report = ast.literal_eval(cell.value)
    assert (report["kind"], report["world"], report["precision"]) == ("MULTI_CPU", 2, "bf16")
    assert report["accumulation"] == [1, 2], (
        "Trainer accumulates by itself; another Accelerator as the file says"
    )
