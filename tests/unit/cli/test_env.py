"""Tests for `notebook-accel env`: what a bug report needs, and no secret."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil

from tests.unit.command import config_of, run


def test_env_says_what_a_bug_report_needs_and_no_secret(tmp_path: Path) -> None:
    config_of(
        tmp_path,
        "num_processes: 3\nenvironment:\n  WANDB_API_KEY: abcdef\n  PROXY: http://me:word@host\n  PLAIN: shown\n",
    )
    variables = {"ACCELERATE_TOKEN": "very", "NCCL_DEBUG": "INFO", "TORCH_URL": "https://u:hidden@h/x"}
    done = run(tmp_path, "env", **variables, OTHER_SETTING="no business")
    assert done.returncode == 0, done.stderr
    for text in (
        "notebook_accel:",
        "torch:",
        "Python:",
        "NCCL_DEBUG=INFO",
        "num_processes: 3",
        "PLAIN: shown",
    ):
        assert text in done.stdout
    for text in ("very", "abcdef", "word", "hidden", "OTHER_SETTING"):
        assert text not in done.stdout
    found = json.loads(run(tmp_path, "env", "--json", **variables).stdout)
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["packages"]["psutil"] == psutil.__version__
    assert found["start_method"] == ("fork" if sys.platform == "linux" else found["start_method"])


def test_env_shows_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    path = config_of(tmp_path, "num_processes: none of them\n")
    done = run(tmp_path, "env")
    assert done.returncode == 0, done.stderr
    assert f"{path}:1: num_processes 'none of them' is no whole number" in done.stdout


def test_env_shows_a_config_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("num_processes: 7\n")
    done = run(tmp_path, "env", "--config_file", str(tmp_path / "own.yaml"))
    assert done.returncode == 0 and "num_processes: 7" in done.stdout
    assert run(tmp_path, "env", "--config_file", "none.yaml").returncode == 2
