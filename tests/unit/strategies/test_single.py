"""Models of kinds that are no plain modules, beside a plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel.accelerator import Accelerator
from tests.unit.multiprocess import run_ranks

KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "scripted": torch.jit.script,
    "traced": lambda model: torch.jit.trace(model, torch.ones(1, 2)),
    "with a scripted part": lambda model: torch.nn.Sequential(torch.jit.script(model[0]), *model[1:]),
}


def train_each(folder: str) -> list[list[float]]:
    """Train, save, spoil and load a model of each kind in two precisions; return the weights of each."""
    seen = []
    for precision in ("no", "bf16"):
        for number, make in enumerate(KINDS.values()):
            accelerator = Accelerator(cpu=True, mixed_precision=precision)
            torch.manual_seed(0)
            model = make(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1)))
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for _ in range(3):
                accelerator.backward(model(torch.ones(4, 2) + accelerator.process_index).mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(f"{folder}/{precision}-{number}")
            weights = [value for p in model.parameters() for value in p.flatten().tolist()]
            for parameter in model.parameters():
                parameter.data.zero_()
            accelerator.load_state(f"{folder}/{precision}-{number}")
            bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            assert [value for p in bare.parameters() for value in p.flatten().tolist()] == weights
            assert len(accelerator.get_state_dict(model)) == 4
            seen.append(weights)
        accelerator.state._reset_state(reset_partial_state=False)
    return seen


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_models_train_and_load_as_plain_ones(processes: int, tmp_path: Path) -> None:
    found = run_ranks(train_each, str(tmp_path), world_size=processes)
    for precision in (found[0][: len(KINDS)], found[0][len(KINDS) :]):
        for weights in precision:
            assert weights == pytest.approx(precision[0], rel=1e-2)
    assert found[-1] == found[0]
