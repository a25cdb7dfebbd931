"""Hugging Face's Trainer in launched functions: the run knows its steps and losses, and a stop saves its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.takeover.test_finder import run

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SCRIPT = (Path(__file__).parent / "trainer_stop_script.txt").read_text()
LIMITED = (Path(__file__).parent / "trainer_limit_script.txt").read_text()

STEPS = 100_000  # of the script: more than there is time for before the stop


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script wrote."""
    return run_script(SCRIPT, tmp_path_factory.mktemp("trainer"))


def run_script(text: str, folder: Path) -> dict[str, Any]:
    """Run a script in a folder, and return what it wrote there."""
    (folder / "train.py").write_text(text)
    run("import runpy; runpy.run_path('train.py', run_name='__main__')", cwd=folder, HF_HOME=str(folder))
    values: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return values


def test_the_run_has_what_trainer_logs_once(found: dict[str, Any]) -> None:
    entries = [entry for entry in found["metrics"] if "train_loss" not in entry]
    names = ("step", "loss", "learning_rate", "eval_loss")
    expected = [
        {name: entry[name] for name in names if name in entry}
        for entry in found["ranks"][0]["stopped"]["log"]
    ]
    assert [{name: entry[name] for name in names if name in entry} for entry in entries] == expected
    assert any("eval_loss" in entry for entry in expected)


def test_a_stop_reaches_all_ranks_at_one_step(found: dict[str, Any]) -> None:
    first, second = (report["stopped"]["step"] for report in found["ranks"])
    assert 9 <= first == second < STEPS


def test_the_checkpoint_of_a_stop_resumes_exactly(found: dict[str, Any]) -> None:
    assert len(found["ranks"]) == 2
    assert all(report["resumed"] == report["whole"] for report in found["ranks"])


def test_the_checkpoint_of_a_stop_is_kept_beside_the_best_one(tmp_path: Path) -> None:
    """Trainer, which keeps one checkpoint, would remove all but the best when it ends."""
    found = run_script(LIMITED, tmp_path)
    assert found["best"] == "checkpoint-3" and found["step"] >= 7
    assert found["kept"] == sorted({"checkpoint-3", f"checkpoint-{found['step']}"})
    assert found["limits"] == [1, 1]
