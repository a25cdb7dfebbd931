"""Packages that do not fit, in environments that a test makes."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from notebook_accel import probes
from tests import forker
from tests.structure.source import ROOT


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


CHECK = """
import sys
from notebook_accel.diagnosis import checks, compiled, packages
packages.DISTRIBUTION = "ours"
for check in (*checks._libraries("libraries"), *compiled.check_torchao("torchao")):
    print(check.status, check.text, check.as_script, sep=" | ")
"""


def test_what_does_not_fit_is_named_with_the_command_that_mends_it(python: Path, index: Path) -> None:
    wheel(index, "ours", "1.0", "missing_one>=2", "old_one>=2", "torch>=99")
    wheel(index, "old_one", "1.0")
    wheel(index, "torchao", "0.4", code="raise ImportError('no such name in torch')")
    run(python, index, "-m", "pip", "install", "--no-deps", "ours", "old_one==1.0", "torchao==0.4")
    torch = probes.version("torch")
    assert run(python, index, "-c", CHECK).splitlines() == [
        "problem | missing_one missing, needed is >=2 | pip install 'missing_one>=2'",
        "problem | old_one 1.0, needed is >=2 | pip install 'old_one>=2'",
        f"problem | torch {torch}, needed is >=99 | pip install 'torch>=99'",
        f"warning | torchao 0.4 cannot be imported beside torch {torch} (ImportError: no such name in torch)"
        " | # torchao: install a torchao that was released with this torch",
    ]


def test_peft_asks_for_a_newer_torchao_in_its_code(python: Path, index: Path, tmp_path: Path) -> None:
    wheel(index, "torchao", "0.10.0")
    run(python, index, "-m", "pip", "install", "--no-deps", "torchao==0.10.0")
    peft = tmp_path / "wheels" / "peft"
    peft.mkdir()
    (peft / "__init__.py").write_text("raise ImportError('it is not imported')")
    (peft / "import_utils.py").write_text('TORCHAO_MINIMUM_VERSION = packaging.version.parse("0.16.0")\n')
    code = f"import sys; sys.path.insert(0, {str(index)!r})\n" + (
        "from notebook_accel.diagnosis import packages\nprint(packages.find_torchao_problem())\n"
    )
    assert run(python, index, "-c", code) == "PEFT None refuses torchao 0.10.0: it asks for 0.16.0\n"
