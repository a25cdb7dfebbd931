"""Tests for training and saving with FSDP: processes that share weights do what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator
from notebook_accel.data_loader import DataLoaderConfiguration
from notebook_accel.fsdp import FullyShardedDataParallelPlugin
from tests.unit import gpt
from tests.unit.multiprocess import run_ranks

BATCH = 8
STEPS = 50
HALF = 25


class Run:
    """A training that can stop in the middle and go on: two batches a step, clipped, with a schedule."""

    def __init__(self, plugin: FullyShardedDataParallelPlugin | None, **options: Any) -> None:
        config = DataLoaderConfiguration(split_batches=True)
        self.accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2, dataloader_config=config, **options
        )
        torch.manual_seed(0 if self.accelerator.is_main_process else 1)  # all are to start as rank 0
        model = gpt.GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, gpt.loader(BATCH, 2 * STEPS), schedule
        )

    def train(self, first: int, last: int) -> list[float]:
        """Return the losses of these steps."""
        losses: list[torch.Tensor] = []
        for number, batch in enumerate(self.accelerator.skip_first_batches(self.loader, 2 * first)):
            with self.accelerator.accumulate(self.model):
                loss = gpt.loss_of(self.model, batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean"))
            if number + 1 == 2 * (last - first):
                break
        return torch.stack(losses).tolist()  # type: ignore[no-any-return]


def sharded(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **options
    )


def whole(**options: Any) -> FullyShardedDataParallelPlugin:
    """Return what version 1 says for the same, with whole checkpoints."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=1,
        sharding_strategy="SHARD_GRAD_OP",
        auto_wrap_policy="SIZE_BASED_WRAP",
        min_num_params=5000,
        backward_prefetch="NO_PREFETCH",
        forward_prefetch=True,
        activation_checkpointing=True,
        state_dict_type="FULL_STATE_DICT",
        **options,
    )


def first_half(folder: str) -> list[float]:
    run = Run(sharded())
    losses = run.train(0, HALF)
    run.accelerator.save_state(f"{folder}/sharded")
    run.accelerator.end_training()
    return losses


def both_halves(folder: str) -> dict[str, Any]:
    run = Run(sharded())
    run.accelerator.load_state(f"{folder}/sharded")
    found: dict[str, Any] = {"resumed": run.train(HALF, STEPS)}
    run.accelerator.save_state(f"{folder}/async", async_save=True)
    whole_state = run.accelerator.get_state_dict(run.model)
    other = Run(whole())
    found["version 1"] = other.train(0, HALF)
    other.accelerator.save_state(f"{folder}/whole")
    run.accelerator.end_training()
    return {**found, "state": whole_state}


def second_half(folder: str) -> list[float]:
    run = Run(whole())
    run.accelerator.load_state(f"{folder}/whole")
    return run.train(HALF, STEPS)


@pytest.mark.timeout(400)
def test_the_losses_of_one_process(clean_runtime: None, tmp_path: Path) -> None:
    """Four processes, two that go on from their checkpoint, and four that go on from two."""
    alone = Run(None)
    expected = alone.train(0, STEPS)
    assert expected[-1] < 0.7 * expected[0]
    for losses in run_ranks(first_half, str(tmp_path), world_size=4, timeout=180):
        torch.testing.assert_close(losses, expected[: 2 * HALF], rtol=1e-4, atol=1e-4)
    first, second = run_ranks(both_halves, str(tmp_path), timeout=180)
    torch.testing.assert_close(first["resumed"], expected[2 * HALF :], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first["version 1"], expected[: 2 * HALF], rtol=1e-4, atol=1e-4)
    assert second["state"] == {}
    torch.testing.assert_close(
        first["state"], alone.accelerator.get_state_dict(alone.model), rtol=1e-3, atol=1e-4
    )
    for losses in run_ranks(second_half, str(tmp_path), world_size=4, timeout=180):
        torch.testing.assert_close(losses, expected[2 * HALF :], rtol=1e-4, atol=1e-4)
    for name in ("async", "whole"):  # what several wrote, one reads
        alone.accelerator.load_state(tmp_path / name)
