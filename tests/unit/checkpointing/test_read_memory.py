"""Tests for the memory that a process needs to load a checkpoint of which it keeps a part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.state import AcceleratorState
from tests.unit.big_modeling.measured import free_at_once, peak_above, reset_peak
from tests.unit.multiprocess import run_ranks

LAYERS, WIDTH, RANKS = 12, 768, 4
LAYER = WIDTH * WIDTH * 4
SHARE = 2 * LAYERS * LAYER / RANKS
"""Bytes of a process's part of AdamW's two states."""


def build(*, steps: int) -> tuple[Accelerator, Any, Any]:
    """Return a sharded model whose checkpoints are saved whole, and its optimizer after this many steps."""
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="SIZE_BASED_WRAP",
        min_num_params=1,
        state_dict_type="FULL_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model, optimizer = accelerator.prepare(
        trained := nn.Sequential(*layers), torch.optim.AdamW(trained.parameters(), foreach=False)
    )
    for _ in range(steps):
        accelerator.backward(model(torch.ones(1, WIDTH)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, model, optimizer


def local_values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    own = [tensor.detach().to_local() for tensor in model.parameters()]
    for state in optimizer.state.values():
        own += [value.to_local() if hasattr(value, "to_local") else value for value in state.values()]
    return own


def grow(folder: str) -> dict[str, float]:
    """Return how much memory each kind of loading takes at most, in bytes."""
    free_at_once()
    accelerator, *parts = build(steps=2)
    saved = [value.clone() for value in local_values(*parts)]
    found: dict[str, float] = {}
    for safe in (True, False):
        where = f"{folder}/{safe}"
        accelerator.save_state(where, safe_serialization=safe)
        accelerator.load_state(where)  # what a first time takes is not counted
        for steps in (0, 1):
            fresh, *others = build(steps=steps)
            before = reset_peak()
            fresh.load_state(where)
            found[f"safetensors {safe}, {steps} steps"] = peak_above(before)
            assert all(map(torch.equal, local_values(*others), saved))
            del fresh, others
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_process_needs_its_part_and_one_tensor(tmp_path: Path) -> None:
    for found in run_ranks(grow, str(tmp_path), world_size=RANKS):
        for what, peak in found.items():
            assert peak <= 1.2 * SHARE + LAYER, (what, peak, SHARE, LAYER)
