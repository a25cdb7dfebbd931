"""Tests for `notebook-accel doctor`: problems as text, JSON and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forker
from tests.structure.source import ROOT
from tests.unit.command import config_of, run


@pytest.fixture
def beside_torchao(tmp_path: Path) -> Path:
    """A working folder with a torchao that is imported at once; the real one takes doctor longer than all else."""
    folder = tmp_path / "beside"
    (folder / "torchao").mkdir(parents=True)
    (folder / "torchao" / "__init__.py").touch()
    (folder / "torchao" / "float8.py").touch()
    (folder / "torchao-99.0.dist-info").mkdir()
    (folder / "torchao-99.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 99.0\n"
    )
    return folder


def test_a_config_that_cannot_be_read_is_a_problem_and_an_exit_code(
    tmp_path: Path, beside_torchao: Path
) -> None:
    path = config_of(tmp_path, "num_processes: 0\nmixed_precision: fp4\n")
    done = run(tmp_path, "doctor")
    assert done.returncode == 1
    assert f"problem  default config: {path}:1: num_processes 0 is less than 1 ->" in done.stdout
    assert f"{path}:2: mixed_precision" in done.stdout
    found = json.loads(run(tmp_path, "doctor", "--json", cwd=beside_torchao).stdout)
    assert [check["status"] for check in found if check["name"] == "default config"] == ["problem"] * 2
    assert [check["text"][:13] for check in found if check["name"] == "torchao"] == ["torchao 99.0 "]


MAKE = "from notebook_accel.launch import leftovers; import os; leftovers.make_sockets_folder(); os._exit(0)"


@pytest.fixture
def left() -> Iterator[Path]:
    """A folder of sockets whose process ended without removing it."""
    with tempfile.TemporaryDirectory() as folder:  # its path is shorter than pytest's
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
        assert forker.run([sys.executable, "-c", MAKE], env=variables, timeout=240).returncode == 0
        (made,) = Path(folder).glob("accel-*")
        yield made


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")
def test_fix_prints_a_script_that_mends_what_was_found(
    tmp_path: Path, left: Path, beside_torchao: Path
) -> None:
    config_of(tmp_path, "num_processes: 0\n")
    done = run(tmp_path, "doctor", "--fix", cwd=beside_torchao, TMPDIR=str(left.parent))
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and left.exists()
    assert f"rm -r {left}" in lines
    assert any(line.startswith("# default config: correct that line") for line in lines)
    subprocess.run(["sh", "-e"], input=done.stdout, text=True, check=True)
    assert not left.exists()


def test_words_that_do_not_go_together(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--fix", "--json")
    assert done.returncode == 2 and "use one of them" in done.stderr
