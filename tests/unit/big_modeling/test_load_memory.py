"""How much memory and disk the loading of big models takes, and what happens where there is too little."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from notebook_accel import (
    CheckpointError,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from notebook_accel.checkpointing import weights
from tests.unit.big_modeling import loading
from tests.unit.big_modeling.loading import build
from tests.unit.big_modeling.measured import run_program
from tests.unit.big_models import Words, half, save, words
from tests.unit.checkpoints import small_files
from tests.unit.multiprocess import run_ranks

LAYERS, WIDTH = 12, 1600
LAYER = WIDTH * WIDTH * 4


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("form", ["ours", "theirs", "bin"])
def test_peaks(tmp_path: Path, form: str) -> None:
    torch.manual_seed(0)
    model = build(LAYERS, WIDTH)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    file = tmp_path / ("x.bin" if form == "bin" else "x.safetensors")
    if form == "ours":
        weights.write(file, state, {})
    elif form == "theirs":
        save_file({**state, "pad": torch.ones(2)}, file)
        offsets = [entry.offset for entry in weights.read_header(file).entries.values()]
        assert any(offset % 64 for offset in offsets), "values that have to be copied"
    else:
        torch.save(state, file)
    if form == "bin":  # all of it into memory: what stays on the disk would be written first
        fresh = build(LAYERS, WIDTH)
        load_checkpoint_in_model(fresh, file, {"": "cpu"})
        assert torch.equal(fresh[7].weight, state["7.weight"])
        return
    found = run_program(loading.__name__, file, LAYERS, WIDTH)
    stays = LAYERS // 2 * LAYER
    # work space, 11 MB of it for the threads that compare checksums
    assert found["load"] < 1.1 * stays + 2**24, (found, stays)
    assert found["forward"] < 2 * LAYER + 2**23, (found, LAYER)  # a layer, the next one, and work space
    with torch.no_grad():
        expected = float(model(torch.full((1, WIDTH), 0.01)).double().sum())
    assert found["sum"] == expected


def test_a_folder_without_room_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(words(), tmp_path / "m", "bin")
    with init_empty_weights():
        model = Words()
    before, folder = dict(model.named_parameters()), tmp_path / "off"
    calls: list[Any] = [
        lambda: load_checkpoint_and_dispatch(model, file, half(), offload_folder=folder),
        lambda: disk_offload(words(), folder),
        lambda: dispatch_model(words(), half(), offload_dir=folder),
    ]
    with small_files(1000):
        for call in calls:
            with pytest.raises(
                CheckpointError, match=r"\.dat cannot be written, '.*' of shape \[\d+.*\] needs"
            ):
                call()
            assert not folder.exists()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    for call in calls:
        with pytest.raises(CheckpointError, match=r"off has room for 1,000 bytes, and .* of shape \["):
            call()
        assert not folder.exists()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def from_rank_0(folder: str) -> tuple[int, bool]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        fresh = words(1 + rank)
        place = folder if rank == 0 else f"{folder}/not here"
        load_checkpoint_in_model(fresh, place, broadcast_from_rank0=True)
        same = all(torch.equal(a, b) for a, b in zip(fresh.parameters(), words().parameters(), strict=True))
        return rank, same
    finally:
        dist.destroy_process_group()


def test_rank_0_reads_for_the_others(tmp_path: Path) -> None:
    assert run_ranks(from_rank_0, str(save(words(), tmp_path, "bin"))) == [(0, True), (1, True)]
    with pytest.raises(ValueError, match="needs a process group"):
        load_checkpoint_in_model(words(), tmp_path, broadcast_from_rank0=True)
    with pytest.raises(ValueError, match="sends whole weights"):
        load_checkpoint_in_model(words(), tmp_path, broadcast_from_rank0=True, full_state_dict=False)
    fresh = words(1)
    load_checkpoint_in_model(fresh, tmp_path, full_state_dict=False)
    assert torch.equal(fresh.head.weight, words().head.weight)
