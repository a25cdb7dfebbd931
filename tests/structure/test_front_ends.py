"""What front ends can show: VS Code, Colab and others bring the code of ipywidgets' own widgets, and no other.

VS Code's renderer has the modules of `MODULES` in its bundle, and loads others from a CDN, which a notebook without
internet does not reach. An output of JavaScript finds neither `Jupyter` nor `require` there. A saved page is HTML of
which a front end may remove scripts, and which must not send its reader to another server.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import pytest

from tests.structure.source import ROOT

MODULES = {"@jupyter-widgets/base", "@jupyter-widgets/controls", "@jupyter-widgets/output"}
FOLDERS = [ROOT / "widgets", ROOT / "notebook_accel"]
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
# A name space is an identifier that nothing loads.
ALLOWED = re.compile(r"http://www\.w3\.org/2000/svg")
LOADS = re.compile(
    r"""<script|<iframe|<link\b|<object|<embed|javascript:|@import|\bon(?:click|load|error)\s*=|"""
    r"""url\(\s*["']?(?!data:)|(?:src|href|data|action)\s*=\s*["']?(?:https?:)?//""",
    re.IGNORECASE,
)


def read_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and value of each text of a module that is no docstring and not looked for in one."""
    tree = ast.parse(path.read_text())
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            left_out.add(id(node.left))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out:
            yield node.lineno, node.value


def find_loads(text: str) -> list[str]:
    """Return what HTML or CSS loads from elsewhere, or runs."""
    return LOADS.findall(ALLOWED.sub("", text))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        '<img src="https://example.org/x.png">',
        "<a href=//example.org>there</a>",
        "<style>@import 'x.css'</style>",
        "a { background: url(https://example.org/x.png) }",
        "<b onclick='go()'>x</b>",
        "<link rel=stylesheet>",
    ],
)
def test_what_loads_something_is_found(text: str) -> None:
    assert find_loads(text)
    assert not find_loads('<svg xmlns="http://www.w3.org/2000/svg"><img src="data:image/png;base64,x">')


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_runs_or_loads_anything(path: Path) -> None:
    found = [(line, text[:80]) for line, text in read_texts(path) if find_loads(text)]
    assert found == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_javascript_is_sent(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not names & {"Javascript", "IFrame"}
    assert not [text for _, text in read_texts(path) if "application/javascript" in text]


def list_widgets() -> dict[str, set[Path]]:
    """Return the names of `ipywidgets` that the package uses, with the files."""
    found: dict[str, set[Path]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "ipywidgets":
                    found.setdefault(node.attr, set()).add(path)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ipywidgets"):
                raise AssertionError(
                    f"{path} takes names out of ipywidgets, and this test sees only ipywidgets.NAME"
                )
    return found


def test_every_widget_is_one_that_front_ends_bring() -> None:
    found = list_widgets()
    assert {"HTML", "Tab", "Output", "Dropdown"} <= found.keys(), "else they are not found"
    for name, paths in found.items():
        kind = getattr(ipywidgets, name)
        if isinstance(kind, type) and issubclass(kind, ipywidgets.Widget):
            modules = {kind._model_module.default_value, kind._view_module.default_value} - {None}
            assert modules <= MODULES, f"{name} in {sorted(map(str, paths))} is of {modules}"


def test_no_widget_is_made_here() -> None:
    """A class of widgets would need code of its own in the front end."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        names = {
            ast.unparse(base)
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for base in node.bases
        }
        assert not [
            name for name in names if "ipywidgets" in name or name in ("Widget", "DOMWidget", "AnyWidget")
        ]
        assert not [text for _, text in read_texts(path) if text in ("_model_module", "_view_module", "_esm")]
