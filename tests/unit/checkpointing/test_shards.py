"""Tests for save_model, load_checkpoint_in_model, save, load and load_state_dict."""

from __future__ import annotations

import io
import json
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch

from notebook_accel import Accelerator, CheckpointError, load_checkpoint_in_model
from notebook_accel.checkpointing.shards import save_weights
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.utils import load, load_state_dict, save
from tests.unit.checkpoints import Tied, small_files
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.usefixtures("clean_runtime")


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 5))


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", 500, "1KB"])
def test_both_libraries_load_what_was_saved(tmp_path: Path, safe: bool, size: int | str) -> None:
    accelerator = Accelerator(cpu=True)
    original = accelerator.prepare(model())
    accelerator.save_model(original, tmp_path / "m", max_shard_size=size, safe_serialization=safe)
    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    assert len(files) == 1 if size == "10GB" else f"{files[-1]}".endswith("index.json") or len(files) > 2
    for loader in (load_checkpoint_in_model, accelerate.load_checkpoint_in_model):
        fresh = model(1)
        loader(fresh, str(tmp_path / "m"), strict=size == "10GB")
        assert same(fresh, original)
    accelerator.save_model(original, tmp_path / "m", safe_serialization=safe)
    assert len(list((tmp_path / "m").iterdir())) == 1, "shards of an earlier save are gone"


@pytest.mark.parametrize("safe", [True, False])
def test_an_older_index_never_names_newer_shards(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    listed: list[set[str]] = []
    for seed in range(3):
        original = accelerator.prepare(model(seed))
        accelerator.save_model(original, tmp_path, max_shard_size=500, safe_serialization=safe)
        (index,) = tmp_path.glob("*.index.json")
        listed.append(set(json.loads(index.read_text())["weight_map"].values()))
        assert {path.name for path in tmp_path.iterdir()} == {*listed[-1], index.name}
        for loader in (load_checkpoint_in_model, accelerate.load_checkpoint_in_model):
            fresh = model(5)
            loader(fresh, str(tmp_path))
            assert same(fresh, original)
    assert not (listed[0] & listed[1] or listed[1] & listed[2] or listed[0] & listed[2])
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    assert f"{stem}-00001-of-00003.{ending}" in listed[0], "a new folder has the names that other tools write"
    assert f"{stem}-2-00001-of-00003.{ending}" in listed[1]
    for path in tmp_path.glob(f"*.{ending}"):  # the index lists them still
        path.unlink()
    accelerator.save_model(original, tmp_path, max_shard_size=500, safe_serialization=safe)
    assert not listed[2] & {path.name for path in tmp_path.iterdir()}


def test_an_error_leaves_the_older_weights(tmp_path: Path) -> None:
    state = model().state_dict()
    save_weights(state, tmp_path / "m", 500)
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    def refuse(written: Path) -> None:
        raise ValueError(f"{len(list(written.iterdir()))} files")

    for size in ("1GB", 500):
        with pytest.raises(ValueError, match=r"^[14] files$"):
            save_weights(state, tmp_path / "m", size, check=refuse)
        with pytest.raises(ValueError, match="files"):
            save_weights(state, tmp_path / "new", size, check=refuse)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_we_load_accelerates_shards(tmp_path: Path) -> None:
    original = model()
    accelerate.Accelerator(cpu=True).save_model(original, tmp_path / "m", max_shard_size="1KB")
    fresh = model(1)
    load_checkpoint_in_model(fresh, tmp_path / "m", strict=True)
    assert same(fresh, original)


@pytest.mark.parametrize("size", ["10GB", 30])
def test_tied_weights_are_written_once_and_given_to_all_names(tmp_path: Path, size: int | str) -> None:
    original = Tied()
    Accelerator(cpu=True).save_model(original, tmp_path / "m", max_shard_size=size)
    assert load_state_dict(tmp_path / "m" / "model.safetensors").keys() == {"first.weight"}
    untied = Tied()
    untied.second.weight = torch.nn.Parameter(torch.zeros(4, 4))
    for fresh in (Tied(), untied):
        load_checkpoint_in_model(fresh, tmp_path / "m", strict=True)
        assert same(fresh, original)


def test_views_of_one_memory_are_no_ties(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    whole = torch.arange(12.0).reshape(3, 4)
    accelerator.save({"a": whole, "t": whole.T, "part": whole[1:]}, tmp_path / "f.safetensors", True)
    loaded = load_state_dict(tmp_path / "f.safetensors")
    assert torch.equal(loaded["t"], whole.T) and torch.equal(loaded["part"], whole[1:])


def test_casts(tmp_path: Path) -> None:
    original = model()
    Accelerator(cpu=True).save_model(original, tmp_path / "m")
    fresh = model(1)
    load_checkpoint_in_model(fresh, tmp_path / "m", dtype="float16", keep_in_fp32_modules=["2"])
    assert fresh[0].weight.dtype == torch.float16 and fresh[2].weight.dtype == torch.float32
    assert torch.equal(fresh[0].weight, original[0].weight.half())
    with pytest.raises(ValueError, match="dtype 'float17' is unknown"):
        load_checkpoint_in_model(fresh, tmp_path / "m", dtype="float17")


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(model(), tmp_path / "m", max_shard_size=500)
    fresh = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 6))
    before = [value.clone() for value in fresh.state_dict().values()]
    with pytest.raises(CheckpointError, match=r"'2.weight' has shape \[5, 20\], the model's \[6, 20\]"):
        load_checkpoint_in_model(fresh, tmp_path / "m", dtype="float16")
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.state_dict().values(), strict=True))
    index = tmp_path / "m" / "model.safetensors.index.json"
    first = sorted(set(json.loads(index.read_text())["weight_map"].values()))[0]
    (tmp_path / "m" / first).unlink()
    with pytest.raises(CheckpointError, match=f"{first} is missing, though"):
        load_checkpoint_in_model(model(), index)
    index.write_text("[1]")
    with pytest.raises(CheckpointError, match="is no index of weights"):
        load_checkpoint_in_model(model(), index)
    with pytest.raises(ValueError, match="is neither a file of weights"):
        load_checkpoint_in_model(model(), tmp_path / "none")
    for device_map, error in (
        ("auto", "'auto' is none"),
        ({"": "gpu:x"}, "puts '' on 'gpu:x': choose a number"),
    ):
        with pytest.raises(ValueError, match=error):
            load_checkpoint_in_model(model(), tmp_path, device_map=device_map, offload_folder="x")
        with pytest.raises(ValueError, match=error):
            load_state_dict(tmp_path / "m" / first, device_map=device_map)


@pytest.mark.parametrize("size", ["", "10", "x GB", 0, -1, "0MB", True])
def test_wrong_sizes(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ValueError, match=r"size .* is "):
        Accelerator(cpu=True).save_model(model(), tmp_path / "m", max_shard_size=size)
    assert not list(tmp_path.iterdir())


def test_save_and_load(tmp_path: Path) -> None:
    content = {"array": np.arange(3), "tensor": torch.ones(2), "text": "x"}
    save(content, tmp_path / "f")
    found = load(tmp_path / "f")
    assert found["text"] == "x" and found["array"].tolist() == [0, 1, 2]
    save({"f": Path("x")}, tmp_path / "f")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        load(tmp_path / "f")
    assert load(tmp_path / "f", weights_only=False) == {"f": Path("x")}
    with pytest.raises(ValueError, match="'n' is a int"):
        save({"n": 3}, tmp_path / "g", safe_serialization=True)
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_save_names_the_tensors_that_a_safetensors_file_holds_once(tmp_path: Path) -> None:
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    tied["b"] = tied["a"]
    with pytest.warns(
        UserWarning, match=r"shared tensors.*: 'b.weight' \('a.weight'\), 'b.bias' \('a.bias'\)$"
    ):
        save(tied.state_dict(), tmp_path / "f", safe_serialization=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save({"a": torch.ones(1)}, tmp_path / "f", safe_serialization=True)


def test_save_replaces_files_alone(tmp_path: Path) -> None:
    kept, link, pipe = (tmp_path / name for name in ("kept", "link", "pipe"))
    link.symlink_to(kept)
    save([1], link)
    save([2], link)
    assert link.is_symlink() and load(kept) == [2]
    with pytest.raises(IsADirectoryError, match="is a folder"):
        save([3], tmp_path)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        save([4], pipe)
        assert load(io.BytesIO(os.read(reader, 1 << 16))) == [4]
        with pytest.raises(ValueError, match="is a device or pipe"):
            save({"a": torch.ones(1)}, pipe, safe_serialization=True)
    finally:
        os.close(reader)
    assert pipe.is_fifo() and not list(tmp_path.glob("*.part*"))


def save_in_turns(folder: Path) -> list[str]:
    """Return what each failing save raised: the folder is a file, the disk is full; then one works."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    sharded = accelerator.prepare(model())
    said = []
    (file := folder / "file").touch()
    for target, limit in ((file, None), (folder / "full", 1000)):
        with small_files(limit) if limit else nullcontext(), pytest.raises(Exception) as found:
            accelerator.save_model(sharded, target)
        said.append(f"{type(found.value).__name__}: {found.value}")
    accelerator.save_model(sharded, folder / "works")
    return said


def test_all_ranks_learn_that_weights_were_not_saved(tmp_path: Path) -> None:
    first, second = run_ranks(save_in_turns, tmp_path)
    assert first[0].startswith("ValueError: ") and "is a file" in first[0] and "File too large" in first[1]
    for own, other, target in zip(first, second, ("file", "full"), strict=True):
        assert other == f"CheckpointError: the weights were not saved to {tmp_path / target}: rank 0: {own}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "works"]


def save_on_the_main_process(folder: Path, sharded: bool) -> bool:
    """Save a model under DistributedDataParallel, or a whole copy beside a sharded one."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP") if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    prepared = accelerator.prepare(model())
    if accelerator.is_main_process:
        accelerator.save_model(model() if sharded else prepared, folder)
    return accelerator.is_main_process


@pytest.mark.parametrize("sharded", [False, True])
def test_the_main_process_may_save_whole_weights_alone(tmp_path: Path, sharded: bool) -> None:
    assert run_ranks(save_on_the_main_process, tmp_path, sharded) == [True, False]
    assert (tmp_path / "model.safetensors").is_file()
