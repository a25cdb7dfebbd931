"""The pages for readers: what they link to exists, and their cells are Python that uses public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import notebook_accel
from tests.structure.source import ROOT

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
WITHOUT_CELLS = {"tested.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent.name == "docs" and page.name not in WITHOUT_CELLS],
    ids=lambda page: page.name,
)
def test_cells_are_python_with_public_names(page: Path) -> None:
    cells = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert cells
    for cell in cells:
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and node.module == "notebook_accel":
                assert {name.name for name in node.names} <= set(notebook_accel.__all__)
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "notebook_accel":
                assert node.attr in notebook_accel.__all__


def test_pages_of_docs_are_linked() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    unlinked = [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in text]
    assert not unlinked, f"neither README nor CONTRIBUTING links {unlinked}"
