"""What workers take over from the notebook's process."""

from __future__ import annotations

import os
import sys
from multiprocessing import process
from pathlib import Path

import pytest

from notebook_accel.launch.agent.orders import find_directory
from notebook_accel.launch.agent.parent_state import list_path


def test_modules_are_found_in_the_folder_where_the_notebook_began_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "ORIGINAL_DIR", "/began")
    monkeypatch.setattr(sys, "path", ["", "/own"])
    assert list_path() == ("", "/began", "/own")
    monkeypatch.setattr(sys, "path", ["/own"])
    assert list_path() == ("/own",), "a script has no such entry"


def test_a_working_folder_that_was_removed_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_directory() == os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    assert find_directory() == ""
