"""Tests for `notebook-accel doctor`: problems as text, JSON and exit code."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.command import config_of, run


def test_a_config_that_cannot_be_read_is_a_problem_and_an_exit_code(tmp_path: Path) -> None:
    path = config_of(tmp_path, "num_processes: 0\nmixed_precision: fp4\n")
    done = run(tmp_path, "doctor")
    assert done.returncode == 1
    assert f"problem  default config: {path}:1: num_processes 0 is less than 1 ->" in done.stdout
    assert f"{path}:2: mixed_precision" in done.stdout
    found = json.loads(run(tmp_path, "doctor", "--json").stdout)
    assert [check["status"] for check in found if check["name"] == "default config"] == ["problem"] * 2
