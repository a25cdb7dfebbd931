"""Tests for the command where required libraries are missing: a sentence, and `doctor --fix` that installs them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from notebook_accel import requirements
from notebook_accel.cli import missing
from notebook_accel.diagnosis import packages
from tests.unit.test_requirements import SENTENCE, THREE, run


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor"], ["doctor", "--fix"]])
def test_the_command_names_all_that_is_missing(words: list[str]) -> None:
    code = f"sys.argv = ['notebook-accel', *{words}]\nfrom notebook_accel.__main__ import main\nmain()"
    done = run(THREE, code)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {SENTENCE}") and done.stderr.count("\n") == 1, "no traceback"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is planned, installed and started; nothing really is."""
    found: list[Any] = []
    answers = iter([["rich-click>=1.9.3"], []])
    monkeypatch.setattr(requirements, "find_missing", lambda: next(answers))
    monkeypatch.setattr(packages, "plan", lambda wanted: [f"{one.name}==1.9.4" for one in wanted])
    monkeypatch.setattr(packages, "install", found.append)
    monkeypatch.setattr("subprocess.call", lambda words: found.append(words) or 0)
    return found


def test_fix_installs_and_looks_again(pip: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        missing.handle(["doctor", "--fix", "--yes"])
    again = [sys.executable, "-m", "notebook_accel", "doctor", "--fix", "--yes"]
    assert (caught.value.code, pip) == (0, [["rich-click==1.9.4"], again])
    assert "would  libraries: install rich-click==1.9.4; everything else" in capsys.readouterr().out


def test_other_words_install_nothing(pip: list[Any]) -> None:
    with pytest.raises(SystemExit) as caught:
        missing.handle(["launch", "--fix"])
    assert (caught.value.code, pip) == (1, [])


def test_what_pip_refuses_is_said(
    pip: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(wanted: Any) -> list[str]:
        raise packages.PipError("no index")

    monkeypatch.setattr(packages, "plan", refuse)
    with pytest.raises(SystemExit):
        missing.handle(["doctor", "--fix", "--yes"])
    assert "libraries: failed, no index" in capsys.readouterr().out and pip == []
