"""What modules keep beside their tensors, by `get_extra_state`, arrives in models that are placed by a map."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accel import (
    CheckpointError,
    cpu_offload,
    disk_offload,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from notebook_accel.accelerator import Accelerator

MAPS: list[Any] = [
    None,
    "auto",
    {"": "cpu"},
    {"inner": "disk", "last": "cpu"},
    {"inner": "cpu", "last": "disk"},
]


class Scaled(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def make(state: Any) -> nn.ModuleDict:
    return nn.ModuleDict({"inner": nn.Sequential(Scaled(state)), "last": nn.Linear(2, 2)})


@pytest.mark.parametrize("place", MAPS)
@pytest.mark.parametrize("is_safe", [False, True])
def test_extra_state_arrives(tmp_path: Path, place: Any, is_safe: bool) -> None:
    state = torch.tensor([3.0, 4.0]) if is_safe else {"scale": 5, "history": torch.ones(2)}
    kept = dict(make(state).state_dict())
    path = tmp_path / ("model.safetensors" if is_safe else "model.bin")
    if is_safe:
        save_file(kept, path)
    else:
        torch.save(kept, path)
    model = load_checkpoint_and_dispatch(
        make(None), path, place, offload_folder=tmp_path / "rest", strict=True
    )
    assert repr(model["inner"][0].state) == repr(state)
    assert torch.equal(model["inner"][0](torch.eye(2)), nn.functional.linear(torch.eye(2), *_linear(kept)))


def _linear(kept: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return kept["inner.0.weight"], kept["inner.0.bias"]


def test_missing_extra_state_counts_where_names_have_to_match(tmp_path: Path) -> None:
    kept = {name: value for name, value in make(1).state_dict().items() if "_extra_state" not in name}
    torch.save(kept, tmp_path / "model.bin")
    model = make(1)
    load_checkpoint_in_model(model, tmp_path / "model.bin", {"": "cpu"})
    assert torch.equal(model["inner"][0].weight, kept["inner.0.weight"]) and model["inner"][0].state == 1
    with pytest.raises(CheckpointError, match=r"has no weights for 'inner\.0\._extra_state'"):
        load_checkpoint_in_model(model, tmp_path / "model.bin", {"": "cpu"}, strict=True)


@pytest.mark.parametrize("state", [torch.tensor([3.0, 4.0]), {"scale": 5}], ids=["tensor", "dict"])
@pytest.mark.parametrize(
    "offload",
    [
        lambda model, folder: cpu_offload(model),
        lambda model, folder: cpu_offload(model, state_dict=dict(model.named_parameters())),
        lambda model, folder: disk_offload(model, folder),
        lambda model, folder: disk_offload(disk_offload(model, folder), folder),
        lambda model, folder: _load_half(model, folder),
    ],
    ids=["cpu", "given", "disk", "disk twice", "map"],
)
def test_models_with_extra_state_are_offloaded_and_saved(
    tmp_path: Path, clean_runtime: None, offload: Any, state: Any
) -> None:
    model = make(state)
    kept = {name: copy.deepcopy(value) for name, value in model.state_dict().items()}
    offload(model, tmp_path / "off")
    assert model["inner"][0].weight.is_meta
    assert torch.equal(model["inner"][0](torch.eye(2)), nn.functional.linear(torch.eye(2), *_linear(kept)))
    is_safe = isinstance(state, torch.Tensor)
    Accelerator(cpu=True).save_model(model, tmp_path / "saved", safe_serialization=is_safe)
    fresh = make(None)
    load_checkpoint_in_model(fresh, tmp_path / "saved", strict=True)
    assert repr(fresh.state_dict()) == repr(type(fresh.state_dict())(kept))


def _load_half(model: nn.ModuleDict, folder: Path) -> None:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.bin")
    place = {"inner": "disk", "last": "cpu"}
    load_checkpoint_and_dispatch(model, folder / "model.bin", place, offload_folder=folder)


@pytest.mark.parametrize("dropped", ["none", "first", "second"])
def test_extra_state_of_a_shared_module_has_any_of_its_names(
    tmp_path: Path, clean_runtime: None, dropped: str
) -> None:
    """A safetensors file has it once, and says what the other name was."""
    shared = Scaled(torch.tensor([3.0, 4.0]))
    state = nn.ModuleDict({"x": shared, "y": shared}).state_dict()
    if dropped == "none":
        Accelerator(cpu=True).save_model(nn.ModuleDict({"x": shared, "y": shared}), tmp_path)
    else:
        gone = "x." if dropped == "first" else "y."
        save_file({k: v for k, v in state.items() if not k.startswith(gone)}, tmp_path / "model.safetensors")
    fresh = Scaled(None)
    model = nn.ModuleDict({"x": fresh, "y": fresh})
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=True)
    assert torch.equal(fresh.state, shared.state) and torch.equal(fresh.weight, shared.weight)
