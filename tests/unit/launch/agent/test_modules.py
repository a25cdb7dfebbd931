"""Which modules of a notebook its workers find without an import."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_accel.launch.agent.modules import Modules, import_all


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed packages, with the package `fruit`."""
    folder = tmp_path / "site-packages"
    (folder / "fruit").mkdir(parents=True)
    (folder / "fruit" / "__init__.py").write_text("from . import apple\n")
    (folder / "fruit" / "apple.py").touch()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def test_installed_packages_alone(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "local_code.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("fruit", "local_code", "json"):
        importlib.import_module(name)
    names = Modules.capture().names
    assert {"fruit", "fruit.apple", "pytest"} <= set(names)
    others = {"local_code", "json", "notebook_accel", "__main__", "tests"}
    assert not [name for name in names if name.partition(".")[0] in others]


def test_none_by_which_a_kernel_talks_to_its_front_end(installed: Path) -> None:
    (installed / "tornado").mkdir()
    (installed / "tornado" / "__init__.py").touch()
    before = sys.modules.pop("tornado", None)
    try:
        importlib.import_module("tornado")
        assert "tornado" not in Modules.capture().names
    finally:
        if before is not None:
            sys.modules["tornado"] = before


def test_no_alias_and_nothing_twice(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries put modules of other names, and what is no module, into `sys.modules`."""
    fruit = importlib.import_module("fruit")
    monkeypatch.setitem(sys.modules, "fruit.old_name", fruit.apple)
    monkeypatch.setitem(sys.modules, "fruit.nothing", None)  # type: ignore[arg-type]
    names = [
        name for name in Modules.capture(["fruit.apple", "fruit.more"]).names if name.startswith("fruit")
    ]
    assert sorted(names) == ["fruit", "fruit.apple", "fruit.more"]


def test_a_package_that_is_installed_anew_has_another_version(installed: Path) -> None:
    importlib.import_module("fruit")
    before = Modules.capture().versions
    assert Modules.capture().versions == before
    file = installed / "fruit" / "__init__.py"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))
    after = Modules.capture().versions
    assert {name for name in before if after[name] != before[name]} == {"fruit"}


def test_what_cannot_be_imported_keeps_nothing_else_away(installed: Path) -> None:
    (installed / "broken.py").write_text("raise SystemExit(3)\n")
    import_all(["fruit.no_such_module", "broken", "fruit"])
    assert "fruit.apple" in sys.modules and "broken" not in sys.modules
