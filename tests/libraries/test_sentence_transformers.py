"""sentence-transformers' trainer on the take-over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.libraries import sides
from tests.libraries.scripts.embed import CASES

sides.skip_without("sentence_transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, served_by: sides.Hosts) -> sides.Outcomes:
    """What the script gave on both sides."""
    return sides.run_all("embed", tmp_path_factory.mktemp("sentence_transformers"), served_by)


def take_losses(reports: list[dict[str, Any]], case: str) -> list[float]:
    """Return the losses of evaluations, which are taken out of the logs."""
    logs = [report["cases"][case]["log"] for report in reports]
    return [entry.pop("eval_loss") for log in logs for entry in log if "eval_loss" in entry]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_does_the_same(case: str, number: int, done: sides.Outcomes) -> None:
    # In two processes the library drops short rounds, in a batch sampler of its own. Accelerate does not see that and
    # cuts the last batch, which is whole, by the 3 samples that were left of 11: the loss of rank 0 alone remains.
    ours, theirs = (take_losses(done[f"{side}{number}"], case) for side in ("ours", "theirs"))
    assert ours == (pytest.approx(theirs, rel=0.03) if (case, number) == ("pairs", 2) else theirs)
    for found in sides.compare(done[f"ours{number}"], done[f"theirs{number}"], case):
        losses = [entry["loss"] for entry in found["log"] if "loss" in entry]
        assert found["world"] == number and len(losses) == 5
        assert any("checkpoint-" in name for name in found["files"])


def test_the_command_does_the_same(tmp_path: Path, done: sides.Outcomes) -> None:
    launched = sides.launch("embed", tmp_path, 1, "two sets")
    assert sides.compare(launched, done["theirs1"], "two sets")
