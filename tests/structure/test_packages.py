"""The hand-written packages list is complete, and the wheel has everything in it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.structure.source import ROOT, modules


def listed_packages() -> list[str]:
    """Return tool.setuptools.packages; by hand, since Python 3.10 has no tomllib."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert found
    return re.findall(r'"([^"]+)"', found[1])


def test_the_list_is_the_folders() -> None:
    assert listed_packages() == sorted(module.name for module in modules() if module.is_package)


def list_missing(name: str, extras: set[str]) -> Iterator[str]:
    """Yield the requirements of a package with these extras, and of its extras' own extras, that are not installed."""
    for text in importlib.metadata.requires(name) or []:
        needed = Requirement(text)
        if needed.marker and not any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            continue
        if canonicalize_name(needed.name) == name:
            yield from list_missing(name, needed.extras)
            continue
        try:
            if not needed.specifier.contains(importlib.metadata.version(needed.name), prereleases=True):
                yield text
        except importlib.metadata.PackageNotFoundError:
            yield text


def test_nothing_is_skipped_because_the_extra_dev_is_not_whole() -> None:
    """Tests skip without the library that they are about; in this project's own environment none of them is missing."""
    assert not list(list_missing("notebook-accel", {"dev"}))


def test_no_module_imports_what_mypy_leaves_out_of_a_library_that_it_reads() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r'^module = \[([^]]*)\]\nfollow_imports = "skip"$', text, re.MULTILINE)
    skipped = tuple(name for found in lists for name in re.findall(r'"([^"*]+\.)\*"', found))
    assert {"ray.data.", "torch.onnx."} <= set(skipped)
    found = [
        f"{module.where}:{line} {name}"
        for module in modules()
        for line, name in module.imports(("ray", "torch"))
        if f"{name}.".startswith(skipped)
    ]
    assert not found


def test_every_folder_with_code_is_a_package() -> None:
    packages = {module.path.parent for module in modules() if module.is_package}
    assert not {str(m.path.parent) for m in modules() if m.path.parent not in packages}


def test_the_wheel_has_every_module(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    source = tmp_path / "source"  # a copy, because setuptools writes build folders next to what it builds
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("notebook_accel", "widgets"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        ".",
    ]
    subprocess.run([sys.executable, "-m", *command], cwd=source, check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert _takes_over(wheel, tmp_path / "site", "1") and not _takes_over(wheel, tmp_path / "site", "0")
    inside = {name for name in names if name.endswith(".py")}
    expected = {m.name.replace(".", "/") + ("/__init__.py" if m.is_package else ".py") for m in modules()}
    assert inside == expected


def _takes_over(wheel: Path, site: Path, variable: str) -> bool:
    """Return whether Python with this wheel installed, and the variable alone, takes over from Accelerate."""
    zipfile.ZipFile(wheel).extractall(site)
    code = f"import site, sys; site.addsitedir({str(site)!r}); print('notebook_accel.takeover.finder' in sys.modules)"
    environment = {"NOTEBOOK_ACCEL_AS_ACCELERATE": variable, "PATH": ""}
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    return done.stdout.strip() == "True"


def test_a_library_that_installs_a_package_named_tests_hides_none_of_ours(tmp_path: Path) -> None:
    """Some do, also on the images of hosted notebooks; processes that tests start import helpers from here."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    command = [sys.executable, "-c", "import tests.unit.multiprocess"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
