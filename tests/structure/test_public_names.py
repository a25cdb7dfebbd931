"""The public names are frozen: adding or losing one is a decision, made by editing public_names.txt."""

from __future__ import annotations

import ast
from pathlib import Path

import notebook_accel

FROZEN = Path(__file__).with_name("public_names.txt")


def frozen_names() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in FROZEN.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def test_the_list_is_sorted_and_without_doubles() -> None:
    names = frozen_names()
    assert names == sorted(set(names))


def test_the_package_offers_exactly_the_frozen_names() -> None:
    assert sorted(notebook_accel.__all__) == frozen_names()


def test_every_public_name_is_there() -> None:
    assert not [name for name in frozen_names() if not hasattr(notebook_accel, name)]


def test_public_names_are_those_that_types_know() -> None:
    """The names that type checkers import, and the homes that they are imported from at run time, are the same."""
    tree = ast.parse(Path(str(notebook_accel.__file__)).read_text(encoding="utf-8"))
    (typed,) = [
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    homes = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == notebook_accel._HOMES and sorted(homes) == sorted(notebook_accel.__all__)
    assert set(homes) <= set(dir(notebook_accel))
