"""Tests for required libraries that are missing: one sentence names all of them, wherever the first is missed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from notebook_accel import requirements
from tests import forker
from tests.structure.source import ROOT

HIDE = "import sys; sys.modules.update(dict.fromkeys({names!r}))\n"
THREE = ("questionary", "rich_click", "ruamel", "ruamel.yaml")
SENTENCE = (
    "notebook_accel needs questionary, rich-click and ruamel.yaml, which are not installed: pip install '"
)
EXTENSION = """
import IPython
shell = IPython.InteractiveShell.instance()
try:
    shell.extension_manager.load_extension("notebook_accel")
except ImportError as error:
    print(type(error).__name__, error)
"""
PUBLIC = """
try:
    from notebook_accel import notebook_launcher
except ImportError as error:
    print(type(error).__name__, error)
"""


def run(names: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that cannot import some modules."""
    command = [sys.executable, "-c", HIDE.format(names=names) + code]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return forker.run(command, env=variables, stdin=subprocess.DEVNULL, timeout=240)


def test_all_are_here() -> None:
    assert requirements.find_missing() == []


@pytest.mark.parametrize(
    ("code", "names"), [(EXTENSION, THREE), (PUBLIC, ("cloudpickle",)), (f"import torch{PUBLIC}", ("numpy",))]
)
def test_an_import_names_all_that_is_missing(code: str, names: tuple[str, ...]) -> None:
    done = run(names, code)
    assert done.returncode == 0, done.stderr
    sentence = (
        SENTENCE
        if names == THREE
        else f"notebook_accel needs {names[0]}, which is not installed: pip install '"
    )
    assert done.stdout.startswith(f"ImportError {sentence}")


def test_another_missing_module_is_named_as_it_is() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match="No module named 'nothing9'"),
        requirements.explain_missing(),
    ):
        __import__("nothing9")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["doctor"], ["doctor", "--fix"]])
def test_the_command_names_all_that_is_missing(words: list[str]) -> None:
    code = f"sys.argv = ['notebook-accel', *{words}]\nfrom notebook_accel.__main__ import main\nmain()"
    done = run(THREE, code)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: {SENTENCE}") and done.stderr.count("\n") == 1, "no traceback"
