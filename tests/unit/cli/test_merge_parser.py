"""Tests for the parser and the function of `merge-weights` that programs call."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from accelerate.commands import merge as reference
from safetensors.torch import load_file
from torch.distributed.checkpoint import save

from notebook_accel.cli.merge_parser import merge_command, merge_command_parser


@pytest.mark.parametrize("line", ["a b", "a b --unsafe_serialization", "a b --remove-checkpoint-dir"])
def test_words_are_read_as_accelerates_parser_reads_them(line: str) -> None:
    theirs = vars(reference.merge_command_parser().parse_args(line.split()))
    theirs.pop("nondefault", None)
    assert vars(merge_command_parser().parse_args(line.split())) == theirs


def test_it_merges(tmp_path: Path) -> None:
    folder = tmp_path / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a process without a group
        save({"model": {"weight": torch.arange(3.0)}}, checkpoint_id=folder, no_dist=True)
    args = merge_command_parser().parse_args(
        [str(folder), str(tmp_path / "merged"), "--remove_checkpoint_dir"]
    )
    merge_command(args)
    assert load_file(tmp_path / "merged" / "model.safetensors")["weight"].tolist() == [0, 1, 2]
    assert not folder.exists()
