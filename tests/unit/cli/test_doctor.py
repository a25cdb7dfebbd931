"""Tests for `notebook-accel doctor`: problems as text, JSON and exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.structure.source import ROOT
from tests.unit.command import config_of, run


def test_a_config_that_cannot_be_read_is_a_problem_and_an_exit_code(tmp_path: Path) -> None:
    path = config_of(tmp_path, "num_processes: 0\nmixed_precision: fp4\n")
    done = run(tmp_path, "doctor")
    assert done.returncode == 1
    assert f"problem  default config: {path}:1: num_processes 0 is less than 1 ->" in done.stdout
    assert f"{path}:2: mixed_precision" in done.stdout
    found = json.loads(run(tmp_path, "doctor", "--json").stdout)
    assert [check["status"] for check in found if check["name"] == "default config"] == ["problem"] * 2


MAKE = "from notebook_accel.launch.supervise import socket_folder as s; import os; s.make_own(); os._exit(0)"


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A folder of sockets whose process ended without removing it."""
    folder = tempfile.mkdtemp(dir=tmp_path)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
    subprocess.run([sys.executable, "-c", MAKE], env=variables, check=True)
    (made,) = Path(folder).glob("pymp-*")
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")
def test_fix_says_what_it_would_do_and_asks(tmp_path: Path, left: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    variables = {"TMPDIR": str(left.parent), "PIP_NO_INDEX": "1"}
    config_of(tmp_path, "num_processes: 0\n")
    shown = run(tmp_path, "doctor", "--fix", **variables).stdout
    assert f"warning  leftovers: killed runs have left {left}" in shown
    assert f"would  leftovers: remove {left} (sockets of process" in shown
    assert "left  default config: correct that line" in shown
    assert "not done: there is no terminal to ask in, and --yes was not given" in shown and left.exists()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), **variables}
    words = ["-m", "notebook_accel", "doctor", "--fix"]
    for answer, exists in (("n", True), ("y", False)):
        terminal = pexpect.spawn(
            sys.executable, words, env=environment, timeout=100, encoding="utf-8", dimensions=(50, 400)
        )
        while terminal.expect([f"would  leftovers: remove {left} .*Do it", "Do it"]):
            terminal.sendline("n")  # what others have left
        terminal.sendline(answer)
        while not terminal.expect(["Do it", pexpect.EOF]):
            terminal.sendline("n")
        terminal.close()
        assert left.exists() is exists and terminal.exitstatus == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is in use")
def test_yes_asks_nothing(tmp_path: Path, left: Path) -> None:
    done = run(tmp_path, "doctor", "--fix", "--yes", TMPDIR=str(left.parent), PIP_NO_INDEX="1")
    assert f"leftovers: removed {left}\n" in done.stdout and not left.exists()
    assert "no terminal" not in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"), [(["--yes"], "--yes goes with --fix"), (["--fix", "--json"], "use one of them")]
)
def test_words_that_do_not_go_together(tmp_path: Path, words: list[str], sentence: str) -> None:
    done = run(tmp_path, "doctor", *words)
    assert done.returncode == 2 and sentence in done.stderr
