"""Tests for checksums of weights: what is damaged is named and not loaded, and files of others load as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from notebook_accel import (
    Accelerator,
    CheckpointError,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from notebook_accel.checkpointing import merge, models, shards, weights
from notebook_accel.deepspeed import checkpoints as deepspeed_checkpoints
from notebook_accel.utils import load_state_dict
from tests.unit.checkpoints import make_parts, step, values

STATE = {
    "large": torch.arange(3000.0).reshape(50, 60),
    "half": torch.arange(77).half(),
    "none": torch.zeros(0),
    "one": torch.tensor(3),
}


def flip(path: Path, place: int, bit: int = 16) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def damage(path: Path, name: str) -> str:
    """Flip a bit in the middle of a tensor, and return what an error says."""
    entry = weights.read_header(path).entries[name]
    flip(path, entry.offset + entry.nbytes // 2)
    return f"{path.name}: the values of '{name}' are not those that were written"


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5))


def copy_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_same(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("size", ["1GB", 5000])
def test_damaged_values_are_named_and_nothing_is_loaded(tmp_path: Path, size: int | str) -> None:
    shards.save_weights(build().state_dict(), tmp_path, size)
    message = damage(sorted(tmp_path.glob("*.safetensors"))[-1], "2.weight")
    fresh = build(1)
    before = copy_of(fresh)
    for options in ({}, {"dtype": "bfloat16"}, {"device_map": {"": "cpu"}}, {"strict": True}):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint_in_model(fresh, tmp_path, **options)  # type: ignore[arg-type]
        assert is_same(fresh, before)
    with init_empty_weights():
        empty = build()
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint_and_dispatch(empty, tmp_path, {"": "cpu"})
    assert all(parameter.is_meta for parameter in empty.parameters())
    with pytest.raises(CheckpointError, match=message):
        load_state_dict(sorted(tmp_path.glob("*.safetensors"))[-1])
    if size != "1GB":
        with pytest.raises(CheckpointError, match=message):
            merge.merge_weights(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"strict": False}])
def test_a_damaged_checkpoint_changes_nothing(
    tmp_path: Path, clean_runtime: None, options: dict[str, Any]
) -> None:
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(*make_parts())
    step(accelerator, *parts)
    where = accelerator.save_state(tmp_path / "kept")
    step(accelerator, *parts)
    before = values(*parts)
    message = damage(where / "model.safetensors", "2.weight")
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state(where, **options)
    assert values(*parts) == before


def test_damage_is_found_before_weights_go_to_deepspeeds_shards(tmp_path: Path) -> None:
    shards.save_weights(build().state_dict(), tmp_path)
    source = models.open_source(tmp_path / "model.safetensors")
    deepspeed_checkpoints._check_shards(source, build(1))
    source = models.open_source(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=damage(source.path, "0.weight")):
        deepspeed_checkpoints._check_shards(source, build(1))


def test_every_byte_of_the_header_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    weights.write(path, STATE, {"tied": "large"})
    content = path.read_bytes()
    own = content.index(b'checksums":"') + len('checksums":"')
    length = 8 + int.from_bytes(content[:8], "little")
    for place in range(length):
        for bit in (1, 32):
            if bit == 32 and own <= place < own + 8:
                continue  # a hexadecimal digit in the other case is the same
            flip(path, place, bit)
            with pytest.raises(CheckpointError, match=r"x\.safetensors"):
                weights.read(path)
            path.write_bytes(content)
    assert weights.read(path).keys() == STATE.keys()


def test_other_libraries_read_the_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights.write(path, STATE, {})
    for loaded in (load_file(path), accelerate.utils.load_state_dict(str(path))):
        torch.testing.assert_close(loaded, STATE, rtol=0, atol=0)


def test_files_of_others_have_no_checksums(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weights.write(path, STATE, {"tied": "large"})
    with safetensors.safe_open(path, "pt") as file:
        texts = file.metadata()
    changed = {name: value + 1 for name, value in STATE.items()}
    for metadata in (texts, {"format": "pt"}, None):  # tools copy the texts to a file of other values
        save_file(changed, path, metadata=metadata)
        assert all(entry.checksum is None for entry in weights.read_header(path).entries.values())
        torch.testing.assert_close(weights.read(path), changed, rtol=0, atol=0)
    plain = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(plain).to_bytes(8, "little") + plain + b"\1\2")
    assert weights.read(path)["a"].tolist() == [1, 2]
