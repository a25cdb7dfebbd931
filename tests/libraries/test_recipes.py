"""The recipes of the page for those who come from Accelerate: each cell runs as it stands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.libraries import sides
from tests.structure.source import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = (ROOT / "docs" / "from_accelerate.md").read_text()
CELL = re.compile(r"### ([^\n]+)\n+```python\n(.*?)```", re.DOTALL)
RECIPES = dict(CELL.findall(PAGE.partition("## Recipes")[2]))
NEEDS = {
    "Trainer": "transformers",
    "TRL": "trl",
    "PEFT": "peft",
    "Diffusers": "diffusers",
    "Sentence Transformers": "sentence_transformers",
}
FILES = {
    "Trainer": "out/checkpoint-48/model.safetensors",
    "PEFT": "merged/model.safetensors",
    "Diffusers": "state",
}


def test_each_recipe_is_tried() -> None:
    assert RECIPES.keys() == NEEDS.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    (tmp_path / "cell.py").write_text(RECIPES[name])
    first = "import notebook_accel; notebook_accel.take_over_accelerate(); import sys; "
    unwanted = "sys.modules['deepspeed'] = None; "  # no recipe needs it, and its import takes seconds
    sides.call(["-c", f"{first}{unwanted}exec(open('cell.py').read())"], {}, tmp_path)
    if name in FILES:
        assert (tmp_path / FILES[name]).exists()
