"""Tests for bytes that changed in a checkpoint: the file is named, and nothing is loaded on any rank."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, CheckpointError
from notebook_accel.checkpointing import manifest, merge, names
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.state import AcceleratorState
from tests.unit.checkpoints import Counter, make_loader, make_parts, step, values
from tests.unit.multiprocess import run_ranks


def flip(path: Path, place: int, bit: int = 16) -> bytes:
    """Flip a bit of a file, and return its content before that."""
    content = path.read_bytes()
    changed = bytearray(content)
    changed[place] ^= bit
    path.write_bytes(changed)
    return content


def state_of(accelerator: Accelerator, parts: Any) -> Any:
    generators = random.getstate(), torch.get_rng_state().tolist()
    return values(*parts), accelerator.step, generators, [item.value for item in accelerator._custom_objects]


def make(folder: Path, **options: Any) -> tuple[Accelerator, Any, Path]:
    """Return an accelerator that has gone on since the checkpoint."""
    accelerator = Accelerator(cpu=True)
    parts = accelerator.prepare(*make_parts())
    accelerator.prepare(make_loader())
    accelerator.register_for_checkpointing(Counter(3))
    step(accelerator, *parts)
    where = accelerator.save_state(folder / "kept", **options)
    step(accelerator, *parts)
    accelerator._wait_for_writer()
    return accelerator, parts, where


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False, "async_save": True}])
def test_a_flipped_bit_in_any_file_is_named(
    tmp_path: Path, clean_runtime: None, options: dict[str, bool]
) -> None:
    accelerator, parts, where = make(tmp_path, **options)
    before = state_of(accelerator, parts)
    choose = random.Random(0)
    files = names.list_files(where)
    assert len(files) == 7
    for path in files:
        places = range(path.stat().st_size)
        for place in [0, 1, places[-1], *choose.sample(places, 6)]:
            content = flip(path, place, 1 << choose.randrange(8))
            with pytest.raises(CheckpointError, match=path.name):
                accelerator.load_state(where)
            assert state_of(accelerator, parts) == before
            path.write_bytes(content)
    accelerator.load_state(where)
    assert state_of(accelerator, parts) != before


def test_the_damaged_tensor_is_named(tmp_path: Path, clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    layers = [torch.nn.Linear(700, 700, bias=False) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    accelerator.backward(model(torch.ones(1, 700)).sum())
    optimizer.step()
    where = accelerator.save_state(tmp_path / "kept", safe_serialization=False)
    for path, name in (
        (where / names.MODEL, "2.weight"),
        (where / names.OPTIMIZER, "state.2.momentum_buffer"),
    ):
        content = flip(path, path.stat().st_size * 5 // 6)
        with pytest.raises(
            CheckpointError, match=rf"{path.name}: some of the bytes 4,194,304 to 5,.*in '{name}'"
        ):
            accelerator.load_state(where)
        path.write_bytes(content)


def test_every_byte_of_the_manifest_counts(tmp_path: Path, clean_runtime: None) -> None:
    where = make(tmp_path)[2]
    path = where / names.MANIFEST
    for place in range(path.stat().st_size):
        content = flip(path, place, 1 << place % 8)
        with pytest.raises(CheckpointError, match=path.name):
            manifest.read(where)
        path.write_bytes(content)
    assert manifest.read(where).facts == {"world_size": 1, "data_shares": 1, "step": 0}


def test_checkpoints_without_checksums_load(tmp_path: Path, clean_runtime: None) -> None:
    accelerator, parts, where = make(tmp_path)
    before = state_of(accelerator, parts)
    content = json.loads((where / names.MANIFEST).read_text())
    older = {key: value for key, value in content.items() if not key.startswith("checksum")}
    (where / names.MANIFEST).write_text(json.dumps(older, indent=1))
    assert manifest.read(where).checksums == {}
    accelerator.load_state(where)
    assert state_of(accelerator, parts) != before


def test_files_of_another_checkpoint_are_named(tmp_path: Path, clean_runtime: None) -> None:
    accelerator, parts, where = make(tmp_path)
    other = accelerator.save_state(tmp_path / "other")  # of the same sizes
    step(accelerator, *parts)
    before = state_of(accelerator, parts)
    for name in (names.SAFE_MODEL, names.OPTIMIZER, names.SCHEDULER, names.random_states(0)):
        content = (where / name).read_bytes()
        shutil.copy(other / name, where / name)
        with pytest.raises(CheckpointError, match=rf"kept/{name}.* of another checkpoint"):
            accelerator.load_state(where)
        assert state_of(accelerator, parts) == before
        (where / name).write_bytes(content)


def damage_shards(folder: str) -> list[str]:
    """Return what each damaged file of a sharded checkpoint said; on every rank nothing may be loaded."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    built = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(built, torch.optim.AdamW(built.parameters(), lr=0.1))

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 4)).square().sum())
        optimizer.step()
        optimizer.zero_grad()

    def local() -> list[Any]:
        states = [optimizer.optimizer.state[parameter] for parameter in model.parameters()]
        tensors = [*model.parameters(), *(state[key] for state in states for key in sorted(state))]
        parts = [item.to_local() if hasattr(item, "to_local") else item for item in tensors]
        return [item.detach().tolist() for item in parts] + [torch.get_rng_state().tolist()]

    train()
    said = []
    for in_background in (False, True):
        where = accelerator.save_state(Path(folder) / f"kept-{in_background}", async_save=in_background)
        saved = local()
        train()
        accelerator._wait_for_writer()
        before = local()
        for path in names.list_files(where):
            content = path.read_bytes()
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                flip(path, int(len(content) * 0.6))
            accelerator.wait_for_everyone()
            with pytest.raises(CheckpointError) as found:
                accelerator.load_state(where)
            assert local() == before, path
            said.append(f"{path.name}: {found.value}")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                path.write_bytes(content)
        accelerator.wait_for_everyone()
        accelerator.load_state(where)
        assert local() == saved
    accelerator.wait_for_everyone()  # the other rank may still read what this one damages
    if accelerator.is_main_process:
        flip(where / "pytorch_model_fsdp_0" / "__1_0.distcp", 700)
        with pytest.raises(CheckpointError, match=r"__1_0\.distcp: some of the bytes"):
            merge.merge_weights(where / "pytorch_model_fsdp_0", Path(folder) / "merged")
    return said


def test_damaged_shards_are_named_on_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(damage_shards, str(tmp_path), world_size=2):
        assert len(said) == 2 * 9
        for line in said:
            name, _, text = line.partition(": ")
            assert name in text, line
