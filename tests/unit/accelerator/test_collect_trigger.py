"""set_trigger and check_trigger: one process asks, all stop."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel.accelerator import Accelerator
from tests.unit.multiprocess import run_ranks


def ranks_stop() -> list[tuple[int, int, list[float], bool]]:
    return [stop((1,), True), stop((0, 1), False)]


def stop(asking: tuple[int, ...], every_batch: bool) -> tuple[int, int, list[float], bool]:
    """Train with accumulation until a rank in `asking` has seen its third batch; return where each one stopped."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.arange(64.0).reshape(32, 2) / 64, torch.ones(32, 1))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=1)
    )
    batches = steps = 0
    for x, y in loader:
        batches += 1
        with accelerator.accumulate(model):
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
        if accelerator.process_index in asking and batches == 3:
            accelerator.set_trigger()
        if (every_batch or accelerator.sync_gradients) and accelerator.check_trigger():
            break
    weights = [value for parameter in model.parameters() for value in parameter.flatten().tolist()]
    return batches, steps, weights, accelerator.check_trigger()


def test_all_stop_where_one_asks_and_with_accumulation_at_the_next_step() -> None:
    first, second = run_ranks(ranks_stop)
    assert first == second, "the weights too"
    at_once, at_step = first
    assert at_once[:2] == (3, 1) and at_once[3] is False, "the flag is down again"
    assert at_step[:2] == (4, 2)
