"""The hand-written packages list is complete; wheel and sdist have everything in them, and nothing else."""

from __future__ import annotations

import email
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
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


def test_nothing_is_skipped_because_an_extra_is_not_whole() -> None:
    """Tests skip without the library that they are about; in this project's own environment none of them is missing."""
    assert not list(list_missing("notebook-accel", {"dev", "deepspeed", "browser-test"}))


def test_the_libraries_that_tests_are_about_are_in_the_environment_that_runs_them() -> None:
    texts = [file.read_text(encoding="utf-8") for file in (ROOT / "tests/libraries").glob("test_*.py")]
    calls = re.findall(r"^sides\.skip_without\(([^)]*)\)", "\n".join(texts), re.MULTILINE)
    asked = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    assert {"trl", "diffusers"} <= asked
    lines = (ROOT / "constraints-libraries.txt").read_text(encoding="utf-8").splitlines()
    layered = {canonicalize_name(line.partition("==")[0]) for line in lines}
    others = {name for name in asked if canonicalize_name(name) not in layered}
    assert not [name for name in others if importlib.util.find_spec(name) is None]


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


def copy_source(folder: Path) -> Path:
    """Copy what a build reads: setuptools writes folders next to what it builds."""
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("notebook_accel", "widgets", "tests/structure"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that pip builds of a checkout."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77")
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        ".",
    ]
    source = copy_source(folder / "source")
    subprocess.run([sys.executable, "-m", *command], cwd=source, check=True, timeout=240)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_has_every_module(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = {m.name.replace(".", "/") + ("/__init__.py" if m.is_package else ".py") for m in modules()}
    assert inside == {*expected, "notebook_accel/py.typed", "notebook_accel.pth"}


def test_no_link_of_the_description_needs_the_repository(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = email.message_from_bytes(archive.read(name)).get_payload()
    assert isinstance(text, str)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links, before = (re.findall(r'\]\(([^)\s]+)|(?:src|srcset)="([^"]+)', each) for each in (text, readme))
    assert len(links) == len(before) > 30
    for (link, picture), (relative, file) in zip(links, before, strict=True):
        home = "https://github.com/notebook-accel/notebook-accel"
        assert link in (relative, f"{home}/blob/main/{relative}") and picture in (
            "",
            f"{home}/raw/main/{file}",
        )
        assert (link or picture).startswith(("https://", "#"))


def test_the_variable_takes_over_where_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    assert _takes_over(wheel, tmp_path / "site", "1") and not _takes_over(wheel, tmp_path / "site", "0")


def test_the_wheel_is_imported_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, check=True, timeout=240)
    code = (
        "import notebook_accel, notebook_accel.widgets, importlib.metadata as metadata\n"
        "print(notebook_accel.__file__, notebook_accel.widgets.__file__, metadata.version('notebook-accel'), sep='\\n')"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    package = site / "notebook_accel"
    assert done.stdout.splitlines() == [
        str(package / "__init__.py"),
        str(package / "widgets" / "__init__.py"),
        wheel.name.split("-")[1],
    ]


def test_the_sdist_builds_the_same_wheel_and_can_be_published(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("build.__main__", reason="needs the extra `release`")  # `build` may be a folder here
    pytest.importorskip("twine", reason="needs the extra `release`")
    dist = tmp_path / "dist"
    source = copy_source(tmp_path / "source")
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(dist),
    ]  # the wheel is made of the sdist
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (built,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    assert built.name == wheel.name
    assert read_files(built) == read_files(wheel)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests")]
    command = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def read_files(path: Path) -> dict[str, bytes]:
    """Return the files in a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


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
