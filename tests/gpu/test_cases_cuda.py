"""The cases of this folder, by rank and by device; a module's cases run in one launch."""

from __future__ import annotations

import pytest

from tests.gpu.cases import Outcomes, list_cases

MODULES = ("collective_cases", "training_cases", "sharding_cases")
ALL = [(module, name) for module in MODULES for name in list_cases(module)]


@pytest.mark.parametrize(("module", "name"), ALL, ids=[f"{module}:{name}" for module, name in ALL])
def test_case(outcomes: Outcomes, module: str, name: str) -> None:
    text = outcomes.of(module, name)
    if text.startswith("skipped: "):
        pytest.skip(text.removeprefix("skipped: "))
    assert text == "passed", text
