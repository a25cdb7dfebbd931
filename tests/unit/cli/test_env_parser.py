"""Tests for the parser and the function of `env` that programs call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import env as reference

from notebook_accel.cli import env_parser
from notebook_accel.cli.env_parser import env_command, env_command_parser


def test_it_returns_what_accelerates_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n")
    args = env_command_parser().parse_args(["--config_file", str(path)])
    ours, theirs = env_command(args), reference.env_command(args)
    assert "num_processes: 3" in capsys.readouterr().out
    assert ours.keys() == theirs.keys()
    for name in ("Platform", "Python version", "Numpy version", "PyTorch version", "PyTorch accelerator"):
        assert ours[name] == theirs[name]
    assert ours["`Accelerate` configs"]["num_processes"] == 3


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nothing: Any = lambda name: None  # noqa: E731
    monkeypatch.setattr(env_parser, "which", nothing)
    monkeypatch.setattr(env_parser, "default_config_file", str(tmp_path / "none.yaml"))
    found = env_command(env_command_parser().parse_args([]))
    assert found["`accelerate` bash location"] == found["`Accelerate` configs"] == "Not found"
