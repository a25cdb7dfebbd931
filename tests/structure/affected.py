"""Which tests a change concerns, and how closely: by the names of their files, and by what they import."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from tests.structure.source import FOLDERS, ROOT, Module, find_mirrored, modules, resolve

TESTS = ROOT / "tests"
UNIT = TESTS / "unit"
ELSEWHERE = ("benchmarks", "docs", "gpu", "plain", "xla")
"""Folders of tests that need another environment."""


def rank_tests(changed: Collection[Path]) -> dict[Path, int]:
    """Return the files of tests that a change concerns, each with the number of imports between them.

    0 is for a file that changed itself, for the tests of a module that did, and for tests that name a changed file
    which is no Python. A package's own file hands out names; what imports one of them imports the module that has it.

    Args:
        changed: files, also ones that are gone.
    """
    distances = _measure_distances({path for path in changed if path.suffix == ".py"})
    names = [path.name for path in changed if path.suffix != ".py"]
    found = {}
    for module in _find_tests():
        near = [distances[path] for path in (module.path, *_find_mirrored(module.path)) if path in distances]
        near += [0] * any(name in module.text for name in names)
        if near:
            found[module.path] = min(near)
    return found


def _find_tests() -> Iterator[Module]:
    for module in _all_modules().values():
        parts = module.name.split(".")
        if parts[0] == "tests" and parts[-1].startswith("test_") and parts[1] not in ELSEWHERE:
            yield module


@functools.cache
def _all_modules() -> Mapping[str, Module]:
    return {module.name: module for module in modules({**FOLDERS, "tests": TESTS})}


@functools.cache
def _our_modules() -> Mapping[str, Path]:
    return {module.name.partition(".")[2]: module.path for module in modules()}


def _find_mirrored(test: Path) -> set[Path]:
    """Return the files that a file of `tests/unit` tests by its name."""
    if UNIT not in test.parents:
        return set()
    ours = _our_modules()
    return {ours[name] for name in find_mirrored(test.relative_to(UNIT), ours)}


def _measure_distances(changed: Collection[Path]) -> dict[Path, int]:
    """Return how many imports lead from each file to the next one that changed."""
    importers: dict[Path, set[Path]] = {}
    for importer, imported in _arrows().items():
        for path in imported:
            importers.setdefault(path, set()).add(importer)
    distances = dict.fromkeys(changed, 0)
    ahead = list(distances)
    for path in ahead:
        for importer in importers.get(path, ()):
            if importer not in distances:
                distances[importer] = distances[path] + 1
                ahead.append(importer)
    return distances


@functools.cache
def _arrows() -> Mapping[Path, set[Path]]:
    """Return the files that each file imports; those of packages themselves import nothing."""
    return {
        module.path: {
            home.path
            for _, name in module.imports(("notebook_accel", "tests"))
            if (home := _find_home(name)) is not None
        }
        for module in _all_modules().values()
        if not module.is_package
    }


def _find_home(name: str) -> Module | None:
    """Return the module that has what is imported by a name, perhaps from a package that hands it out."""
    known = _all_modules()
    module = known.get(resolve(name, known))
    if module is None or not module.is_package or module.name == name:
        return module
    handed = _handed_out(module.name).get(name.removeprefix(f"{module.name}.").partition(".")[0], name)
    return module if handed == name else _find_home(handed)


@functools.cache
def _handed_out(package: str) -> Mapping[str, str]:
    """Return where a package has the names from that it imports."""
    return {name.rpartition(".")[2]: name for _, name in _all_modules()[package].imports()}
