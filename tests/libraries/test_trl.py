"""TRL's trainers on the take-over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries import sides
from tests.libraries.scripts.train_trl import CASES

sides.skip_without("trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, served_by: sides.Hosts) -> sides.Outcomes:
    """What the script gave on both sides."""
    return sides.run_all("train_trl", tmp_path_factory.mktemp("trl"), served_by)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_does_the_same(case: str, number: int, done: sides.Outcomes) -> None:
    for found in sides.compare(done[f"ours{number}"], done[f"theirs{number}"], case):
        losses = [entry["loss"] for entry in found["log"] if "loss" in entry]
        assert found["world"] == number and len(losses) >= 2
        assert any("checkpoint-" in name for name in found["files"]) or case == "DPO beside a reference"


def test_the_command_does_the_same(tmp_path: Path, done: sides.Outcomes) -> None:
    launched = sides.launch("train_trl", tmp_path, 2, "SFT with LoRA")
    assert sides.compare(launched, done["theirs2"], "SFT with LoRA")
