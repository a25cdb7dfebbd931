"""Reads the package's source for the tests of its structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"notebook_accel": ROOT / "notebook_accel", "notebook_accel.widgets": ROOT / "widgets"}


@dataclass(frozen=True)
class Module:
    """One source file and its dotted name."""

    name: str
    path: Path

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.where)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield the line and absolute name of every import of ours, function-level ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _is_ours(alias.name):
                        yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                if _is_ours(base):
                    for alias in node.names:
                        yield node.lineno, f"{base}.{alias.name}"

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _is_ours(name: str) -> bool:
    return name == "notebook_accel" or name.startswith("notebook_accel.")


def modules() -> list[Module]:
    """Return every module of the package, widgets included, by name."""
    found = []
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found.append(Module(".".join([package, *parts]), path))
    return sorted(found, key=lambda module: module.name)


def resolve(name: str, known: set[str]) -> str:
    """Return the module that an imported name lives in: `pkg.module.thing` is `pkg.module`."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name
