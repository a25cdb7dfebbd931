"""Tests for merging sharded checkpoints into ordinary weights, and for `notebook-accel merge-weights`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from notebook_accel.checkpointing import merge, shards
from notebook_accel.cli.main import main
from notebook_accel.errors import CheckpointError
from notebook_accel.utils import load_checkpoint_in_model, merge_fsdp_weights
from tests import forker
from tests.structure.source import ROOT
from tests.unit.checkpoints import Tied
from tests.unit.multiprocess import do_without_deepspeed, run_ranks


def build() -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3, bias=False)
    )
    model[2].to(torch.bfloat16)
    return model


def fully_sharded() -> Any:
    """Return the model by FSDP2, which leaves each rank its shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model: Any = build()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    assert type(model.state_dict()["0.weight"]).__name__ == "DTensor"
    return model


def save_sharded(folder: str, nested: bool) -> None:
    """Save as torch does, each rank its shards."""
    from torch.distributed import checkpoint

    model = fully_sharded()
    state: dict[str, Any] = dict(model.state_dict())
    if nested:
        optimizer = {"state": {"0.weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
        state = {"model": state, "optimizer": optimizer}
    checkpoint.save(state, checkpoint_id=folder)


def save_by_accelerate(folder: str) -> None:
    """Save a model and its optimizer by what Accelerate calls for FSDP with sharded state dicts.

    Its `save_state` comes there on GPUs only, so that its functions are called with what they ask of an accelerator.
    """
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    do_without_deepspeed()
    model = fully_sharded()
    PartialState(cpu=True)  # which its logger asks for
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.ones(4, 5)).sum().backward()
    optimizer.step()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
    )
    rank = torch.distributed.get_rank()
    accelerator: Any = SimpleNamespace(
        process_index=rank,
        num_processes=2,
        is_main_process=rank == 0,
        is_fsdp2=True,
        wait_for_everyone=torch.distributed.barrier,
    )
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    whole = {
        name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in model.state_dict().items()
    }
    if rank == 0:
        torch.save(whole, Path(folder, "whole.pt"))


def save_and_merge(folder: str, output: str) -> str:
    """Merge from all ranks, then once more, which the output is in the way of."""
    from notebook_accel import PartialState

    save_sharded(folder, nested=False)
    PartialState(cpu=True)
    merge_fsdp_weights(folder, output)
    assert Path(output, "model.safetensors").is_file()
    try:
        merge_fsdp_weights(folder, output)
    except (ValueError, CheckpointError) as error:
        return f"{type(error).__name__}: {error}"
    return "merged twice"


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "pytorch_model_fsdp_0"
    run_ranks(save_sharded, str(folder), False)
    return folder


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return forker.run(
        [sys.executable, "-m", "notebook_accel", "merge-weights", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        timeout=240,
    )


def called(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Return exit code and errors of the command in this process, which has all imported that it needs."""
    with pytest.raises(SystemExit) as end:
        main(["merge-weights", *map(str, arguments)])
    return int(end.value.code or 0), capsys.readouterr().err.strip()


def test_shards_of_two_ranks_become_one_file_that_a_model_loads(sharded: Path, tmp_path: Path) -> None:
    assert len(list(sharded.glob("*.distcp"))) == 2
    files = merge.merge_weights(sharded, tmp_path / "out")
    assert files == [tmp_path / "out" / "model.safetensors"]
    equal(load_file(files[0]), build().state_dict())
    fresh = build()
    for tensor in fresh.parameters():
        tensor.data.zero_()
    load_checkpoint_in_model(fresh, tmp_path / "out", strict=True)
    equal(fresh.state_dict(), build().state_dict())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert (sharded / ".metadata").is_file()


def test_of_a_model_and_its_optimizer_the_model_is_taken(tmp_path: Path) -> None:
    run_ranks(save_sharded, str(tmp_path / "both"), True)
    merge.merge_weights(tmp_path / "both", tmp_path / "out", safe_serialization=False)
    equal(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), build().state_dict())


@pytest.mark.parametrize("outer", [(), ("model",), ("app", "model")])
def test_names_that_begin_with_model_stay(tmp_path: Path, outer: tuple[str, ...]) -> None:
    from torch.distributed import checkpoint

    weights = {"model.a.weight": torch.arange(6.0).reshape(2, 3), "model.b": torch.ones(2, dtype=torch.int64)}
    state: dict[str, Any] = dict(weights)
    for name in reversed(outer):
        state = {name: state}
    if outer:
        innermost = state[outer[0]] if len(outer) > 1 else state
        innermost["optim"] = {"state": {"model.a.weight": {"exp_avg": torch.zeros(2, 3)}}}
    checkpoint.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    merge.merge_weights(tmp_path / "dcp", tmp_path / "out")
    equal(load_file(tmp_path / "out" / "model.safetensors"), weights)


def test_what_is_no_tensor_cannot_become_weights(tmp_path: Path) -> None:
    from torch.distributed import checkpoint

    state = {"a.weight": torch.zeros(2), "a._extra_state": {"scale": 3}}
    checkpoint.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    with pytest.raises(ValueError, match=r"holds 'a._extra_state.*', which is no tensor"):
        merge.merge_weights(tmp_path / "dcp", tmp_path / "out")


def test_what_accelerate_saves_is_merged(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    run_ranks(save_by_accelerate, str(tmp_path / "state"))
    with pytest.raises(ValueError, match=r"name the model's, .*pytorch_model_fsdp_0"):
        merge.merge_weights(tmp_path / "state", tmp_path / "out")
    merge.merge_weights(tmp_path / "state" / "pytorch_model_fsdp_0", tmp_path / "out")
    whole = torch.load(tmp_path / "state" / "whole.pt", weights_only=True)
    assert not torch.equal(whole["0.weight"], build().state_dict()["0.weight"])
    equal(load_file(tmp_path / "out" / "model.safetensors"), whole)
    with pytest.raises(ValueError, match="an optimizer's state and no model's"):
        merge.merge_weights(tmp_path / "state" / "optimizer_0", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_every_rank_may_call_it(tmp_path: Path) -> None:
    told = run_ranks(save_and_merge, str(tmp_path / "shards"), str(tmp_path / "out"))
    assert told[0].startswith("ValueError: ")
    assert told[1].startswith("CheckpointError: rank 0 could not merge the weights: ")
    assert all("has weights already (model.safetensors)" in text for text in told)
    equal(load_file(tmp_path / "out" / "model.safetensors"), build().state_dict())


@pytest.mark.parametrize("safe", [True, False])
def test_files_with_an_index_become_one_and_stay_tied(tmp_path: Path, safe: bool) -> None:
    model = torch.nn.Sequential(Tied(), torch.nn.Linear(4, 4))
    shards.save_weights(model.state_dict(), tmp_path / "many", 64, safe)
    assert len(list((tmp_path / "many").iterdir())) > 2
    merge.merge_weights(tmp_path / "many", tmp_path / "one")
    found = load_file(tmp_path / "one" / "model.safetensors")
    assert len([name for name in found if name.startswith("0.")]) == 1
    fresh = torch.nn.Sequential(Tied(), torch.nn.Linear(4, 4))
    load_checkpoint_in_model(fresh, tmp_path / "one", strict=True)
    equal(fresh.state_dict(), model.state_dict())


def test_files_of_limited_size(sharded: Path, tmp_path: Path) -> None:
    files = merge.merge_weights(sharded, tmp_path, max_shard_size=100)
    assert files[-1].name == "model.safetensors.index.json"
    found = {name: tensor for path in files[:-1] for name, tensor in load_file(path).items()}
    equal(found, build().state_dict())
    listed = json.loads(files[-1].read_text())["weight_map"]
    assert set(listed) == set(found)


def test_the_checkpoint_goes_only_after_the_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = tmp_path / "many"
    shards.save_weights(build().state_dict(), many, 64)
    monkeypatch.setattr(merge, "_is_same", lambda one, other: False)
    with pytest.raises(CheckpointError, match="read back with other values"):
        merge.merge_weights(many, tmp_path / "out", remove_checkpoint_dir=True)
    assert not (tmp_path / "out").exists()
    assert many.is_dir()
    monkeypatch.undo()
    merge.merge_weights(many, tmp_path / "out", remove_checkpoint_dir=True)
    assert not many.exists()
    equal(load_file(tmp_path / "out" / "model.safetensors"), build().state_dict())


@pytest.mark.parametrize("count", range(4))
def test_a_process_that_dies_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Die at each renaming: what is found is refused or whole, and the next merge puts all right."""
    shards.save_weights(build().state_dict(), tmp_path / "many", 64)
    done = [0]
    replace = os.replace

    class Killed(BaseException):
        """The process is gone."""

    def dying(source: Any, target: Any) -> None:
        if Path(target).parent == tmp_path / "out":
            if done[0] == count:
                raise Killed
            done[0] += 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    with pytest.raises(Killed):
        merge.merge_weights(tmp_path / "many", tmp_path / "out", max_shard_size=100)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"expected model\.safetensors|is neither a file of weights"):
        shards.find_files(tmp_path / "out")
    assert (tmp_path / "many").is_dir()
    merge.merge_weights(tmp_path / "many", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_values_that_are_no_numbers_are_compared_by_their_bytes(tmp_path: Path) -> None:
    state = {"a": torch.tensor([float("nan"), -0.0]), "b": torch.zeros(0), "c": torch.tensor(True)}
    shards.save_weights(state, tmp_path / "many", 4)
    merge.merge_weights(tmp_path / "many", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found["a"].view(torch.int32).tolist() == state["a"].view(torch.int32).tolist()


def test_the_command(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = command(sharded, tmp_path / "out", "--unsafe_serialization")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path / 'out' / 'pytorch_model.bin'}: " in done.stdout
    equal(torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True), build().state_dict())
    monkeypatch.setenv("COLUMNS", "200")
    code, errors = called(capsys, sharded, tmp_path / "out")
    assert code == 2
    assert errors.endswith("has weights already (pytorch_model.bin): overwrite=True or --force replaces them")
    code, errors = called(capsys, sharded, tmp_path / "out", "--force")
    assert code == 0, errors
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_wrong_places_are_refused(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ValueError, match="is no folder"):
        merge.merge_weights(file, tmp_path / "out")
    with pytest.raises(ValueError, match="is a file"):
        merge.merge_weights(sharded, file)
    with pytest.raises(ValueError, match="in it: choose another folder"):
        merge.merge_weights(sharded, sharded / "out", remove_checkpoint_dir=True)
    with pytest.raises(ValueError, match="is no sharded checkpoint"):
        merge.merge_weights(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="size 'much'"):
        merge.merge_weights(sharded, tmp_path / "out", max_shard_size="much")
    monkeypatch.chdir(sharded)
    with pytest.raises(ValueError, match="holds the working folder"):
        merge.merge_weights(sharded, tmp_path / "out", remove_checkpoint_dir=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "metadata"])
def test_damaged_shards_are_named(sharded: Path, tmp_path: Path, damage: str) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(sharded, broken)
    shard = sorted(broken.glob("*.distcp"))[0]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:40])
    else:
        (broken / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"broken.* is (missing|cut off)"):
        merge.merge_weights(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, errors = called(capsys, sharded, tmp_path / "file" / "out")
    assert code == 1
    assert errors.splitlines()[-1].startswith("Error: [Errno ")
    assert "Traceback" not in errors


def test_a_full_disk_leaves_nothing(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merge.rawio, "memory", full)
    with pytest.raises(OSError, match="No space left"):
        merge.merge_weights(sharded, tmp_path / "out", remove_checkpoint_dir=True)
    assert not (tmp_path / "out").exists()
    assert sharded.is_dir()
