"""Files of sharded models and optimizers, written and read by two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, CheckpointError, FullyShardedDataParallelPlugin
from notebook_accel.utils import fsdp_files
from tests.unit.checkpoints import small_files
from tests.unit.multiprocess import run_ranks


def make(
    kind: str, seed: int, rule: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[Accelerator, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return accelerator, *accelerator.prepare(model, rule(model.parameters(), lr=0.1 * seed))


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(accelerator.process_index)
    accelerator.backward(model(torch.rand(3, 4, generator=generator)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def weights(model: Any) -> list[Any]:
    return [parameter.full_tensor().tolist() for parameter in model.parameters()]


def save_and_load(
    folder: str, kind: str, rule: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[bool, bool, list[str]]:
    """Train, save and train on; a second model that loads is trained alike."""
    accelerator, model, optimizer = make(kind, seed=1, rule=rule)
    plugin = accelerator.state.fsdp_plugin
    train(accelerator, model, optimizer)
    fsdp_files.save_fsdp_model(plugin, accelerator, model, folder)
    fsdp_files.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    accelerator.wait_for_everyone()
    files = sorted(path.name for path in Path(folder).iterdir())
    _, other, fresh = make(kind, seed=2, rule=rule)
    before = weights(other) == weights(model)
    result = fsdp_files.load_fsdp_model(plugin, accelerator, other, folder)
    assert not result.missing_keys and not result.unexpected_keys
    fsdp_files.load_fsdp_optimizer(plugin, accelerator, fresh, other, folder)
    for each in ((model, optimizer), (other, fresh)):
        train(accelerator, *each)
    return before, weights(other) == weights(model), files


def save_frozen(folder: str, kind: str) -> tuple[bool, list[str]]:
    """A model with a frozen layer that is no PEFT model, saved as Trainer does, and a second index."""
    accelerator, model, _ = make(kind, seed=3)
    model[0].requires_grad_(False)
    plugin = accelerator.state.fsdp_plugin
    fsdp_files.save_fsdp_model(plugin, accelerator, model, folder, 1, adapter_only=True)
    accelerator.wait_for_everyone()
    _, other, _ = make(kind, seed=4)
    other[0].requires_grad_(False)
    fsdp_files.load_fsdp_model(plugin, accelerator, other, folder, 1, adapter_only=True)
    return weights(other) == weights(model), [path.name for path in Path(folder).iterdir()]


def save_and_load_both(folder: str) -> list[Any]:
    kinds = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")
    return [
        (
            save_and_load(f"{folder}/{kind}", kind),
            save_frozen(f"{folder}/{kind}-frozen", kind),
            save_and_load(f"{folder}/{kind}-stateless", kind, torch.optim.SGD),
        )
        for kind in kinds
    ]


def test_training_goes_on_from_the_files(tmp_path: Path) -> None:
    for (whole, whole_frozen, whole_sgd), (shards, shards_frozen, shards_sgd) in run_ranks(
        save_and_load_both, str(tmp_path)
    ):
        assert whole_sgd == whole and shards_sgd == shards
        assert whole_frozen == (True, ["pytorch_model_fsdp_1.bin"])
        assert shards_frozen == (True, ["pytorch_model_fsdp_1"])
        assert whole == (False, True, ["optimizer.bin", "pytorch_model_fsdp.bin"])
        assert shards == (False, True, ["optimizer_0", "pytorch_model_fsdp_0"])


def save_without_room(folder: str) -> str:
    accelerator, model, _ = make("SHARDED_STATE_DICT", seed=1)
    with small_files(100), pytest.raises(CheckpointError) as caught:
        fsdp_files.save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)
    return str(caught.value)


def test_all_ranks_say_what_the_system_said_of_shards_that_cannot_be_written(tmp_path: Path) -> None:
    first, second = run_ranks(save_without_room, str(tmp_path))
    assert first == second
    assert first.endswith("_0 was not written: rank 0, rank 1: OSError: [Errno 27] File too large"), first


def test_files_for_one_number_of_processes_are_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(NotImplementedError, match="leave it out"):
        fsdp_files.save_fsdp_model(plugin, None, nn.Linear(1, 1), "x", use_dcp=False)  # type: ignore[arg-type]


def test_parameters_of_modules_by_a_pattern() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = fsdp_files.get_parameters_from_modules("1", model, torch.device("cpu"))
    assert found == set(model[1].parameters())
    assert fsdp_files.get_parameters_from_modules([model[0]], model, torch.device("cpu")) == set(
        model[0].parameters()
    )
    assert fsdp_files.get_parameters_from_modules(None, model, torch.device("cpu")) == set()
