"""PEFT's adapters over dispatched and offloaded models, and in a training loop, on the take-over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries import sides
from tests.libraries.scripts.adapt_peft import CASES

sides.skip_without("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, served_by: sides.Hosts) -> sides.Outcomes:
    """What the script gave on both sides."""
    return sides.run_all("adapt_peft", tmp_path_factory.mktemp("peft"), served_by)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_lora_does_the_same(case: str, number: int, done: sides.Outcomes) -> None:
    for found in sides.compare(done[f"ours{number}"], done[f"theirs{number}"], case):
        if case == "train":
            assert found["world"] == number and len(found["rates"]) == 13 // number + (number == 2)
            continue
        if case == "merge":
            assert "disk" in found["map"].values()
            assert len({found[when] for when in ("whole", "adapted", "merged", "unmerged", "unloaded")}) == 1
            continue
        assert found["trained" if case == "dispatch" else "whole"] == found["adapted"]
        assert found["hooks"] and (case == "offload" or not found["left"])


def test_the_command_does_the_same(tmp_path: Path, done: sides.Outcomes) -> None:
    launched = sides.launch("adapt_peft", tmp_path, 1, "train")
    assert sides.compare(launched, done["theirs1"], "train")
