"""The pages for readers: all are reached, what they link to exists, and their cells are Python with public names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import notebook_accel
from notebook_accel import utils
from tests.structure.pages import (
    DOCS,
    FENCE,
    list_contents,
    list_pages,
    read_anchors,
    read_blocks,
    read_links,
)
from tests.structure.source import ROOT

PAGES = list_pages()
MOST_LINES = 150
"""Of README: what is longer is a page of docs."""
DIRECTIVE = re.compile(r"^\.\. auto\w+:: notebook_accel\.(\S+)$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert "make demo" in text and "make test" in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    missing = []
    for link in read_links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in read_anchors(target)):
            missing.append(link)
    assert not missing, f"{name_of(page)} links to {missing}"


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=name_of)
def test_pages_of_the_site_link_to_pages_of_the_site(page: Path) -> None:
    """README is no page of it: what it says is on others."""
    targets = {(page.parent / link.partition("#")[0]).resolve() for link in read_links(page)}
    assert ROOT / "README.md" not in targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_cells_are_python_with_public_names(page: Path) -> None:
    for block in read_blocks(page):
        if block.kind != "python" or (page.parent == ROOT and page.name != "README.md"):
            continue
        for node in ast.walk(ast.parse(block.code, block.where)):
            if isinstance(node, ast.ImportFrom) and node.module == "notebook_accel":
                assert {name.name for name in node.names} <= set(notebook_accel.__all__), block.where
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "notebook_accel":
                assert node.attr in notebook_accel.__all__, block.where


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_mark_of_a_block_that_is_not_run_stands_before_one_and_has_a_reason(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    reasons = [block.not_run for block in read_blocks(page) if block.not_run]
    marks = re.findall(r"<!-- not run", FENCE.sub("", text))
    assert len(reasons) == len(marks) and all(len(reason) > 10 for reason in reasons)


def test_every_page_is_reached_from_the_first() -> None:
    reached = list(list_contents(DOCS / "index.md"))
    expected = {*PAGES, *(ROOT / "tutorials").glob("*.ipynb")} - {ROOT / "README.md"}
    assert set(reached) == expected
    assert len(reached) == len(expected), "a page is in two tables of contents"


def test_readme_leads_to_pages_and_tutorials() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in read_links(ROOT / "README.md")}
    assert DOCS / "index.md" in linked
    assert set((ROOT / "tutorials").glob("*.ipynb")) <= linked


def test_the_reference_has_every_public_name_once() -> None:
    names = [name for page in (DOCS / "api").glob("*.md") for name in DIRECTIVE.findall(page.read_text())]
    assert len(names) == len(set(names))
    missing = [name for name in notebook_accel.__all__ if name not in names]
    told = (DOCS / "api" / "utils.md").read_text(encoding="utf-8")
    missing += [
        f"utils.{name}"
        for name in utils.__all__
        if f"utils.{name}" not in names
        and f"`{name}`" not in told
        and f"`~notebook_accel.{name}`" not in told
    ]
    assert not missing, f"docs/api does not have {missing}"
