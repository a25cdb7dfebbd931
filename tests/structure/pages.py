"""Reads the pages for readers: their blocks of code, headings, links and tables of contents."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.structure.source import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$\n?", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: (.*?) -->\s*\Z")
"""What stands before a block that no test runs, with the reason."""


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        kind: the word after the fence, such as `python` or `{toctree}`.
        not_run: why no test runs it; empty where one does.
    """

    page: Path
    line: int
    kind: str
    code: str
    not_run: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def list_pages() -> list[Path]:
    """Return all pages that are written by hand."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*top, *sorted(DOCS.rglob("*.md"))]


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for found in FENCE.finditer(text):
        mark = MARK.search(text, 0, found.start())
        blocks.append(
            Block(
                page=page,
                line=text.count("\n", 0, found.start()) + 1,
                kind=found[3].strip(),
                code=textwrap.dedent(found[4]),
                not_run=mark[1] if mark else "",
            )
        )
    return blocks


def read_prose(page: Path) -> str:
    """Return a page without its blocks and without code between backticks."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def read_links(page: Path) -> list[str]:
    """Return what a page links to and shows, apart from addresses of the web."""
    prose = read_prose(page)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|srcset|href)="([^"]+)"', prose)
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def read_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as hosts of repositories and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def list_contents(page: Path) -> Iterator[Path]:
    """Yield the pages that lie below a page in the tables of contents, itself first."""
    yield page
    if page.suffix != ".md":
        return
    for block in read_blocks(page):
        if block.kind == "{toctree}":
            for line in block.code.splitlines():
                if line and not line.startswith(":"):
                    (base, name) = (page.parent / line).resolve().parent, Path(line).name
                    found = [path for end in (".md", ".ipynb") for path in sorted(base.glob(f"{name}{end}"))]
                    assert found, f"{block.where}: no page {line}"
                    for path in found:
                        yield from list_contents(path)
