"""Tests for `tpu-config`: the words that call gcloud, as Accelerate's command has them."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import tpu as reference

from notebook_accel.cli import tpu_parser
from notebook_accel.cli.tpu_parser import tpu_command_launcher, tpu_command_parser
from tests.unit.command import run

CONFIG = """
distributed_type: XLA
num_processes: 8
tpu_name: pod
tpu_zone: zone-a
commands: [ls, "echo a b"]
"""
POD = ["--tpu_name", "one", "--tpu_zone", "zone-b"]


def printed(command: Any, args: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        command(args)
    return shown.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        [*POD, "--command", "ls"],
        [*POD, "--command", "ls", "a", "--command", 'echo "a"', "--use_alpha"],
        [*POD, "--command_file", "commands.sh", "--install_accelerate"],
        [*POD, "--command", "ls", "--install_accelerate", "--accelerate_version", "dev"],
        ["--config_file", "own.yaml"],
        ["--config_file", "own.yaml", *POD, "--install_accelerate", "--accelerate_version", "1.2.0"],
        ["--config_file", "own.yaml", "--command_file", "commands.sh"],
        ["--config_file", "own.yaml", "--command", "ls", "--command", "pwd"],
        ["--config_file", "other.yaml"],
    ],
)
def test_the_call_is_accelerates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(CONFIG)
    Path("other.yaml").write_text(CONFIG.replace("commands: [ls, ", "command_file: commands.sh #"))
    Path("commands.sh").write_text("echo one\necho two\n")
    theirs = printed(
        reference.tpu_command_launcher, reference.tpu_command_parser().parse_args([*words, "--debug"])
    )
    assert printed(tpu_command_launcher, tpu_command_parser().parse_args([*words, "--debug"])) == theirs


@pytest.mark.parametrize(
    ("words", "text"), [(POD, "--command"), (["--command", "ls"], "--tpu_name"), ([], "--command_file")]
)
def test_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.setattr(tpu_parser, "default_config_file", str(tmp_path / "none.yaml"))
    with pytest.raises(ValueError, match=text):
        tpu_command_launcher(tpu_command_parser().parse_args(words))


def test_gcloud_is_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[list[str]] = []

    def call(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        return subprocess.CompletedProcess(words, len(calls) - 1)

    monkeypatch.setattr(subprocess, "run", call)
    for _ in range(2):
        tpu_command_launcher(tpu_command_parser().parse_args([*POD, "--command", "ls"]))
    assert calls[0][0] == "gcloud" and "cd /usr/share; ls" in calls[0]
    assert capsys.readouterr().out == "The pod is set up.\ngcloud ended with exit code 1\n"


def test_the_command_does_it_too(tmp_path: Path) -> None:
    done = run(tmp_path, "tpu-config", *POD, "--command", "ls", "--debug")
    assert done.stdout.startswith("Running gcloud compute tpus tpu-vm ssh one --zone zone-b")
    assert run(tmp_path, "tpu-config", *POD).returncode == 2
