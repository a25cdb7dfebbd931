"""What runs before a script in its process."""

from __future__ import annotations

import sys

import pytest

from notebook_accel.launch.worker import script


def test_the_script_finds_modules_in_the_order_that_it_would_have_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [script._PLACE, "/elsewhere", *sys.path])
    before = list(sys.path)
    assert script._ours("errors").__name__ == "notebook_accel.errors"
    assert sys.path == before
