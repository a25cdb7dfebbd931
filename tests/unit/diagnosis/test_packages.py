"""Repairs of packages, by pip in environments that a test makes: what is there keeps its version."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from notebook_accel import probes
from tests import forker
from tests.structure.source import ROOT

FIND = """
import json, sys
from notebook_accel.diagnosis import checks, packages, repairs
packages.DISTRIBUTION = "ours"
found = list(checks._libraries("libraries"))
for one in repairs.find(found):
    print(repairs.describe(one))
    if isinstance(one, repairs.Repair):
        print(repairs.apply(one))
print(json.dumps([[check.status, check.text] for check in checks._libraries("libraries")]))
"""


def wheel(folder: Path, name: str, version: str, *needs: str, code: str = "") -> None:
    """Write a wheel with one module."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", code)
        archive.writestr(f"{name}/float8.py", code)
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
        archive.writestr(f"{info}/METADATA", "".join(lines + [f"Requires-Dist: {need}\n" for need in needs]))
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An environment with its own packages, where everything of this one can be imported too, pip among it."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.check_output([python, "-c", code], text=True).strip())
    (site / "layer.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    return python


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    return folder


def run(python: Path, index: Path, *words: str) -> str:
    """Run something whose pip has the wheels of a folder, and no index."""
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PATH": "/usr/bin:/bin"}
    done = forker.run([str(python), *words], env=variables, stdin=subprocess.DEVNULL, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_is_missing_is_installed_and_nothing_else_changes(python: Path, index: Path) -> None:
    wheel(index, "ours", "1.0", "missing_one>=2", "old_one>=2", "torch>=99", "beside>=1")
    wheel(index, "beside", "1.0")
    wheel(index, "beside", "2.0")
    wheel(index, "missing_one", "1.0")
    wheel(index, "missing_one", "2.0", "beside>=1")
    wheel(index, "missing_one", "3.0", "beside>=2")  # would replace what is there
    wheel(index, "old_one", "1.0")
    wheel(index, "old_one", "2.0", "beside>=2")
    run(python, index, "-m", "pip", "install", "--no-deps", "ours", "old_one==1.0", "beside==1.0")
    *lines, last = run(python, index, "-c", FIND).splitlines()
    torch = probes.version("torch")
    assert lines[:2] == [
        "would  libraries: install missing_one==2.0; everything else keeps its version",
        "libraries: installed missing_one==2.0",
    ]
    assert lines[2].startswith("left  libraries: old_one>=2 cannot be installed beside what is there: ")
    assert lines[3].startswith(f"left  libraries: torch {torch} left as they are: ") and len(lines) == 4
    assert json.loads(last) == [
        ["problem", "old_one 1.0, needed is >=2"],
        ["problem", f"torch {torch}, needed is >=99"],
    ]
    listed = run(python, index, "-m", "pip", "list", "--format=json")
    versions = {one["name"]: one["version"] for one in json.loads(listed)}
    assert (versions["beside"], versions["old_one"]) == ("1.0", "1.0")


def test_the_newest_torchao_that_can_be_imported_is_taken(python: Path, index: Path) -> None:
    fails = "raise ImportError('no such name in torch')"
    for version, code in (("0.1", ""), ("0.2", ""), ("0.3", fails), ("0.4", fails)):
        wheel(index, "torchao", version, code=code)
    run(python, index, "-m", "pip", "install", "--no-deps", "torchao==0.4")
    code = (
        "from notebook_accel.diagnosis import compiled, repairs\n"
        "found = list(compiled.check_torchao('torchao'))\n"
        "(one,) = repairs.find(found)\n"
        "print(found[0].status, found[0].text, repairs.describe(one), repairs.apply(one), sep='\\n')\n"
    )
    status, text, would, done = run(python, index, "-c", code).splitlines()
    torch = probes.version("torch")
    assert status == "warning"
    assert text == (
        f"torchao 0.4 cannot be imported beside torch {torch} (ImportError: no such name in torch)"
    )
    assert would.startswith(
        f"would  torchao: install the newest torchao that works beside torch {torch}, in place"
    )
    assert done == "torchao: installed torchao==0.2"
    assert (
        run(
            python, index, "-c", "import torchao.float8, importlib.metadata as m; print(m.version('torchao'))"
        )
        == "0.2\n"
    )


def test_peft_asks_for_a_newer_torchao_in_its_code(python: Path, index: Path, tmp_path: Path) -> None:
    wheel(index, "torchao", "0.10.0")
    wheel(index, "torchao", "0.17.0")
    run(python, index, "-m", "pip", "install", "--no-deps", "torchao==0.10.0")
    peft = tmp_path / "wheels" / "peft"
    peft.mkdir()
    (peft / "__init__.py").write_text("raise ImportError('it is not imported')")
    (peft / "import_utils.py").write_text('TORCHAO_MINIMUM_VERSION = packaging.version.parse("0.16.0")\n')
    code = f"import sys; sys.path.insert(0, {str(index)!r})\n" + (
        "from notebook_accel.diagnosis import packages, repairs\n"
        "print(packages.find_torchao_problem())\n"
        "print(repairs._torchao('torchao')[0].apply())\n"
    )
    assert run(python, index, "-c", code).splitlines() == [
        "PEFT None refuses torchao 0.10.0: it asks for 0.16.0",
        "installed torchao==0.17.0",
    ]
