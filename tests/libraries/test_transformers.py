"""Transformers' loading by device maps, with limits and quantized, on the take-over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries import sides
from tests.libraries.scripts.load import CASES

sides.skip_without("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, served_by: sides.Hosts) -> sides.Outcomes:
    """What the script gave on both sides."""
    return sides.run_all("load", tmp_path_factory.mktemp("transformers"), served_by, ("theirs1", "ours1"))


@pytest.mark.parametrize("number", [1])
@pytest.mark.parametrize("case", CASES)
def test_loading_does_the_same(case: str, number: int, done: sides.Outcomes) -> None:
    for found in sides.compare(done[f"ours{number}"], done[f"theirs{number}"], case):
        if case == "choose":
            assert "disk" in found["limited"]["map"].values()
            assert found["limited"]["greedy"] == found["auto"]["greedy"]
            assert found["moved"] == "RuntimeError"
        elif case == "quantize":
            assert "Linear4bit" in found["4 bits, auto"]["kinds"]
            assert "Linear8bitLt" in found["8 bits, auto"]["kinds"]


def test_the_command_does_the_same(tmp_path: Path, done: sides.Outcomes) -> None:
    launched = sides.launch("load", tmp_path, 1, "tied")
    assert sides.compare(launched, done["theirs1"], "tied")
