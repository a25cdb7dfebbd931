"""Every tutorial opens where notebooks are hosted: links to itself, and a cell that installs the package."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.structure.source import ROOT

TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
BLOB = "notebook-accel/notebook-accel/blob/main/tutorials"
BADGES = (
    "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    f"(https://colab.research.google.com/github/{BLOB}/NAME)\n"
    "[![Open in Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)]"
    f"(https://kaggle.com/kernels/welcome?src=https://github.com/{BLOB}/NAME)"
)
TAG = "install"

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


@each_tutorial
def test_it_links_to_itself_on_hosts(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert first.source == BADGES.replace("NAME", path.name)


@each_tutorial
def test_its_first_code_installs_the_package(path: Path) -> None:
    """The tag tells `tutorials/run.py` that it needs no such cell; hosts that execute whole notebooks run it."""
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert code[0].source.splitlines()[-1] == '%pip install --quiet "notebook-accel[tutorial]"'
    assert code[0].metadata.get("tags") == [TAG]
    assert not [cell for cell in code[1:] if "%pip" in cell.source or TAG in cell.metadata.get("tags", [])]
