"""Reads the package's source for the tests of its structure."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping
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

    def imports(self, packages: Collection[str] = ("notebook_accel",)) -> Iterator[tuple[int, str]]:
        """Yield the line and absolute name of every import from some packages, function-level ones included."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in packages:
                        yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                if base.partition(".")[0] in packages:
                    for alias in node.names:
                        yield node.lineno, f"{base}.{alias.name}"

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        parts = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, *([node.module] if node.module else [])])


def _is_of(package: str, name: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def modules(folders: Mapping[str, Path] = FOLDERS) -> list[Module]:
    """Return every module of the package, widgets included, or of other folders, by name."""
    found = [module for package, folder in folders.items() for module in _read_folder(package, folder)]
    return sorted(found, key=lambda module: module.name)


@functools.cache
def _read_folder(package: str, folder: Path) -> list[Module]:
    """Return the modules of a folder; always the same ones, since each is parsed once."""
    found = []
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        found.append(Module(".".join([package, *parts]), path))
    return found


def find_mirrored(path: Path, names: Collection[str]) -> set[str]:
    """Return what a file of `tests/unit` tests by its name: `test_NAME.py`, or `test_NAME_more.py`.

    In a folder, NAME may also be the folder's own: such a file tests what the modules of the package do together.

    Args:
        path: of the file below `tests/unit`.
        names: of all modules and packages, without `notebook_accel.`.
    """
    words = path.stem.removeprefix("test_").split("_")
    firsts = {"_".join(words[: end + 1]) for end in range(len(words))}
    package = ".".join(path.parent.parts)
    if package and path.parent.name in firsts:
        return {name for name in names if _is_of(package, name)}
    return {".".join([*path.parent.parts, first]) for first in firsts} & set(names)


def resolve(name: str, known: Collection[str]) -> str:
    """Return the module that an imported name lives in: `pkg.module.thing` is `pkg.module`."""
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return name
