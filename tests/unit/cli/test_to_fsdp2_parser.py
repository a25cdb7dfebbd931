"""Tests for `to-fsdp2`: options of FSDP in the words of its version 2, as Accelerate's command writes them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands import to_fsdp2 as reference

from notebook_accel.cli.to_fsdp2_parser import (
    convert_config_to_fsdp2,
    load_config,
    to_fsdp2_command,
    to_fsdp2_command_parser,
)
from notebook_accel.config import file
from tests.unit.command import run

TEXT = """
distributed_type: FSDP
mixed_precision: no
num_processes: 2
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fsdp_version": 2, "fsdp_use_orig_params": True},
        {"fsdp_version": 1, "fsdp_offload_params": True, "unknown": 5},
        {
            "fsdp_backward_prefetch": "NO_PREFETCH",
            "fsdp_forward_prefetch": True,
            "fsdp_use_orig_params": True,
        },
        {"fsdp_sync_module_states": True, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
        *({"fsdp_sharding_strategy": name} for name in ("FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")),
        *({"fsdp_reshard_after_forward": value} for value in ("SHARD_GRAD_OP", "NO_SHARD", True, False)),
    ],
)
def test_options_become_what_accelerate_makes_of_them(options: dict[str, Any]) -> None:
    config = {"num_processes": 2, "fsdp_config": options}
    theirs = reference.convert_config_to_fsdp2(copy.deepcopy(config))
    assert convert_config_to_fsdp2(config) == theirs
    assert convert_config_to_fsdp2({}) == {}


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    convert_config_to_fsdp2({"fsdp_config": {"fsdp_use_orig_params": True}})
    assert "fsdp_use_orig_params: left out" in caplog.text
    convert_config_to_fsdp2({"fsdp_config": {"fsdp_version": 2}})
    assert "already" in caplog.text


@pytest.mark.parametrize("ending", [".yaml", ".json"])
def test_a_file_is_written(tmp_path: Path, ending: str) -> None:
    path, output = tmp_path / f"old{ending}", tmp_path / f"new{ending}"
    path.write_text(json.dumps(yaml.safe_load(TEXT)) if ending == ".json" else TEXT)
    before = path.read_text()
    words = ["--config-file", str(path), "--output_file", str(output)]
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(words))
    found = file.read(output).config
    assert (found.fsdp_config.fsdp_version, found.fsdp_config.fsdp_reshard_after_forward) == (2, False)
    assert found.mixed_precision == "no"
    assert yaml.safe_load(output.read_text())["mixed_precision"] == "no", "older YAML reads it as a word too"
    assert path.read_text() == before
    to_fsdp2_command(to_fsdp2_command_parser().parse_args(["--config_file", str(path), "--overwrite"]))
    assert path.read_text() == output.read_text()


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (["--config_file", "none.yaml", "--overwrite"], FileNotFoundError, r"none\.yaml"),
        (["--config_file", "old.yaml"], ValueError, "--output_file"),
        (["--config_file", "old.yaml", "--output_file", "old.yaml"], FileExistsError, "--overwrite"),
        (["--config_file", "empty.yaml", "--overwrite"], ValueError, "empty"),
    ],
)
def test_wrong_words_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    error: type[Exception],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(TEXT)
    Path("empty.yaml").write_text("")
    for parse, command in (
        (to_fsdp2_command_parser, to_fsdp2_command),
        (reference.to_fsdp2_command_parser, reference.to_fsdp2_command),
    ):
        with pytest.raises(error, match=text if parse is to_fsdp2_command_parser else None):
            command(parse().parse_args(words))


def test_values_are_read_as_words(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("mixed_precision: no\ndistributed_type: NO\n")
    assert load_config(str(tmp_path / "a.yaml")) == {"mixed_precision": "no", "distributed_type": "NO"}


def test_the_command_does_it_too(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(TEXT)
    done = run(tmp_path, "to-fsdp2", "--config_file", str(path), "--overwrite")
    assert done.returncode == 0 and "fsdp_backward_prefetch: left out" in done.stderr
    assert "fsdp_version: 2" in path.read_text()
    done = run(tmp_path, "to-fsdp2", "--config_file", str(tmp_path / "none.yaml"), "--overwrite")
    assert (done.returncode, "Error: there is no config file" in done.stderr) == (1, True)
    assert "--output_file" in run(tmp_path, "to-fsdp2", "--help").stdout
