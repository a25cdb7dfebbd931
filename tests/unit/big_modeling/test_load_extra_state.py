"""What modules keep beside their tensors, by `get_extra_state`, arrives in models that are placed by a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from notebook_accel import CheckpointError, load_checkpoint_and_dispatch, load_checkpoint_in_model

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
