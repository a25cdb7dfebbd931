"""What two processes do with hooks of checkpoints under FSDP, in the launch of `test_fsdp2_cases.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from notebook_accel import Accelerator, CheckpointError, dtensors
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from notebook_accel.state import AcceleratorState


class Own(nn.Linear):
    """A layer that loads by code of its own."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


def try_all(folder: str) -> None:
    """Save with a hook that fails on one rank while others gather or open a group, and with such that save a model."""

    def fail(models: Any, weights: Any, where: str) -> None:
        if accelerator.process_index == 1:
            raise KeyError("what it looks for")

    for kind, in_background in (("FULL_STATE_DICT", False), ("SHARDED_STATE_DICT", True)):
        AcceleratorState._reset_state()
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        built = Own(4, 4)
        optimizer: Any = torch.optim.AdamW(built.parameters(), lr=0.1)
        built, optimizer = accelerator.prepare(built, optimizer)
        saved = stepped(accelerator, built, optimizer)
        hook = accelerator.register_save_state_pre_hook(fail)
        with pytest.raises((CheckpointError, KeyError), match="what it looks for"):
            accelerator.save_state(f"{folder}/hooked", async_save=in_background)
        hook.remove()
        if in_background:
            accelerator.register_save_state_pre_hook(lambda models, weights, where: weights.clear())
            accelerator.register_load_state_pre_hook(lambda models, where: models.clear())
        accelerator.save_state(f"{folder}/hooked", async_save=in_background)
        later = stepped(accelerator, built, optimizer)
        accelerator.load_state(f"{folder}/hooked")
        assert values(built, optimizer) == ((saved[0], later[1]) if in_background else saved)
        assert saved[0] != later[0] and saved[1] != later[1]


def stepped(accelerator: Accelerator, built: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    accelerator.backward(built(torch.ones(1, 4)).sum())
    optimizer.step()
    return values(built, optimizer)


def values(built: nn.Module, optimizer: Any) -> tuple[Any, Any]:
    """Return the optimizer's state and the weights, whole."""
    states = [item for state in optimizer.state.values() for _, item in sorted(state.items())]
    first, second = (
        [dtensors.to_full(item).tolist() for item in items] for items in (states, built.parameters())
    )
    return first, second
