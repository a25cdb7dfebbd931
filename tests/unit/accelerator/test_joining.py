"""Ranks with different numbers of batches that accumulate gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator
from notebook_accel.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from tests.unit.multiprocess import run_ranks

RATE = 0.1
BATCH = 2
Found = tuple[list[bool], float, float]
"""Which batches of a rank had a step, the mean of what it has added up, and its weight in the end."""


def ranks_that_join(
    samples: int,
    each_batch: bool,
    compiled: bool = False,
    epochs: int = 1,
    ends_with_loader: bool = True,
    by_name: bool = False,
) -> Found:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=3, sync_each_batch=each_batch, sync_with_dataloader=ends_with_loader
        ),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    values = torch.arange(1.0, samples + 1)[:, None]
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(values), BATCH))
    if compiled:
        model = torch.compile(model, backend="eager")
    synced, seen = [], 0.0
    for _ in range(epochs):
        with accelerator.join_uneven_inputs([model]):
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = model.forward(batch) if by_name else model(batch)
                    accelerator.backward(loss.mean())
                    optimizer.step()
                    optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
                seen += float(batch.mean())
    assert compiled or "forward" not in vars(model)
    return synced, seen, float(next(model.parameters()).detach())


@pytest.mark.parametrize("each_batch", [False, True])
@pytest.mark.parametrize(
    ("samples", "steps"),
    [
        (13, ([0, 0, 1, 1], [0, 0, 1])),
        (17, ([0, 0, 1, 1, 1], [0, 0, 1, 1])),
        (21, ([0, 0, 1, 0, 1, 1], [0, 0, 1, 0, 1])),
        (25, ([0, 0, 1, 0, 0, 1, 1], [0, 0, 1, 0, 0, 1])),
    ],
)
def test_ranks_step_together_and_leave_no_batch_out(
    samples: int, steps: tuple[list[int], list[int]], each_batch: bool
) -> None:
    found: list[Found] = run_ranks(ranks_that_join, samples, each_batch)
    assert [synced for synced, _, _ in found] == [list(map(bool, rank)) for rank in steps]
    total = sum(seen for _, seen, _ in found) / (2 * 3)  # two ranks, three batches a step
    assert [weight for _, _, weight in found] == pytest.approx([-RATE * total] * 2)


def test_a_compiled_model_asks_too() -> None:
    found: list[Found] = run_ranks(ranks_that_join, 13, False, True)
    assert [synced for synced, _, _ in found] == [[False, False, True, True], [False, False, True]]
    assert found[0][2] == found[1][2] == pytest.approx(-RATE * sum(seen for _, seen, _ in found) / 6)


def test_a_forward_by_its_name_asks_too() -> None:
    found: list[Found] = run_ranks(ranks_that_join, 13, False, False, 1, True, True)
    assert [synced for synced, _, _ in found] == [[False, False, True, True], [False, False, True]]
    assert found[0][2] == found[1][2]


def test_ranks_that_count_on_step_together_too() -> None:
    """A rank with more batches is further in the next epoch, where nothing but the count says when to step."""
    found: list[Found] = run_ranks(ranks_that_join, 13, False, False, 3, False)
    weights = [weight for _, _, weight in found]
    assert weights[0] == weights[1] != 0.0
    for epoch in range(3):
        longer, shorter = found[0][0][4 * epoch :][:4], found[1][0][3 * epoch :][:3]
        assert longer[:3] == shorter, epoch


def test_three_ranks() -> None:
    found: list[Found] = run_ranks(ranks_that_join, 13, False, False, 2, world_size=3)
    assert len({weight for _, _, weight in found}) == 1
