"""DeepSpeed on two processes trains as one process without it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator
from notebook_accel.state import AcceleratorState
from notebook_accel.utils import DeepSpeedPlugin
from tests.unit.multiprocess import run_ranks
from tests.unit.small_gpt import SmallGPT, Source

pytest.importorskip("deepspeed", reason="the extra deepspeed is not installed")

STEPS = 50
BATCH = 4  # of a process
WITHIN = 2e-5  # of losses near 3, over 50 steps in float32


def schedule(step: int) -> float:
    """Rates by the steps of one process; two processes get through two in a step."""
    return min(1.0, (step + 1) / 20) * (1 - step / (4 * STEPS))


def parts(seed: int = 0) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(seed)
    model = SmallGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = torch.utils.data.DataLoader(Source(2 * 2 * BATCH * STEPS), batch_size=BATCH)
    return model, optimizer, scheduler, loader


def plain() -> tuple[list[float], list[float]]:
    """Return losses by batch and norms by step of one process that sees the batches of both, without any library."""
    model, optimizer, scheduler, loader = parts()
    losses, norms = [], []
    batches = torch.stack(list(loader)).view(2 * STEPS, 2 * BATCH, -1)
    for number, batch in enumerate(batches, start=1):
        loss = model(batch)
        losses.append(float(loss))
        (loss / 2).backward()
        if number % 2 == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            for _ in range(2):
                scheduler.step()
            optimizer.zero_grad()
    return losses, norms


def train(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    batches: Iterator[torch.Tensor],
    count: int,
) -> tuple[list[float], list[float]]:
    """Go on for a number of batches, as every loop of an accelerator does."""
    losses, norms = [], []
    for _, batch in zip(range(count), batches, strict=False):
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses, norms


def zero(stage: int, folder: str) -> dict[str, Any]:
    """Train half, save, spoil everything, load into other objects, and train the other half."""
    warnings.simplefilter("error", FutureWarning)
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), gradient_accumulation_steps=2
    )
    assert str(accelerator.distributed_type) == "DEEPSPEED"
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    batches = iter(loader)
    losses, norms = train(accelerator, model, optimizer, scheduler, batches, STEPS)
    accelerator.backward(model(next(iter(loader))) * 1000)  # gradients that nobody wants
    optimizer.zero_grad()
    accelerator.save_state(folder)
    accelerator.free_memory()

    model, optimizer, scheduler, loader = accelerator.prepare(*parts(seed=1))
    accelerator.load_state(folder)
    rest = accelerator.skip_first_batches(loader, STEPS)
    more = train(accelerator, model, optimizer, scheduler, iter(rest), STEPS)
    return {"losses": losses + more[0], "norms": norms + more[1]}


def on_ranks(folder: str) -> dict[str, Any]:
    return {f"zero {stage}": zero(stage, f"{folder}/{stage}") for stage in (1, 2, 3)}


def test_zero(tmp_path: Path) -> None:
    losses, norms = plain()
    for found in run_ranks(on_ranks, str(tmp_path), timeout=110):
        for stage in (1, 2, 3):
            own = found[f"zero {stage}"]
            assert own["losses"] == pytest.approx(losses, abs=WITHIN)
            assert own["norms"] == pytest.approx(norms, rel=1e-3)
