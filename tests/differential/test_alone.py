"""What Accelerate cannot do on CPUs, compared with torch by hand: uneven inputs, fp16, several bare processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from notebook_accel import Accelerator, PartialState
from notebook_accel.handlers import GradScalerKwargs
from tests.differential.parts import linear, regression, sgd
from tests.unit.multiprocess import run_ranks

SAMPLES = 9
EPOCHS = 4


def raw_share(rank: int, batch_size: int = 2) -> list[Any]:
    """Return this rank's batches of a loader, dealt out in turn and not evened."""
    return list(regression(SAMPLES, batch_size))[rank::2]


def values(model: torch.nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


def joined(accelerator: Accelerator) -> tuple[int, list[float]]:
    """Accelerate's `join_uneven_inputs` does nothing on CPUs: the rank with more batches waits for ever."""
    own = linear()
    model, optimizer, loader = accelerator.prepare(own, sgd(own), regression(SAMPLES))
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for x, y in loader:
            accelerator.backward(mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    assert loader.batch_sampler.even_batches, "only within the block"
    return batches, values(own)


def joined_by_hand(rank: int, batches: list[Any]) -> tuple[int, list[float]]:
    own = linear()
    model = DistributedDataParallel(own)
    optimizer = sgd(own)
    with Join([model]):
        for x, y in batches:
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return len(batches), values(own)


def halved(accelerator: Accelerator) -> tuple[list[bool], list[float]]:
    """Train in fp16, which Accelerate refuses on CPUs, from a scale that overflows at first."""
    own = linear()
    loader = regression(12)
    model, optimizer, loader = accelerator.prepare(own, sgd(own), loader)
    skipped = []
    for x, y in (batch for _ in range(EPOCHS) for batch in loader):
        accelerator.backward(mse_loss(model(x), y) * 64)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    return skipped, values(own)


def halved_by_hand(batches: list[Any], scale: float) -> tuple[list[bool], list[float]]:
    own = linear()
    model = DistributedDataParallel(own)
    optimizer = sgd(own)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    skipped = []
    for x, y in batches * EPOCHS:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale(mse_loss(out.float(), y) * 64).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale() < before)
    return skipped, values(own)


def on_each_rank() -> dict[str, Any]:
    from notebook_accel import runtime

    del os.environ["ACCELERATE_USE_CPU"]  # bare processes, as torchrun starts them
    scale = 2.0**17
    seen: dict[str, Any] = {"processes": Accelerator(cpu=True).num_processes}
    accelerator = Accelerator()
    rank = accelerator.process_index
    seen["joined"] = joined(accelerator), joined_by_hand(rank, raw_share(rank))
    runtime.reset()
    handlers = [GradScalerKwargs(init_scale=scale)]
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=handlers)
    even: Any = DataLoader(Subset(regression(12).dataset, range(12)), batch_size=2)
    seen["fp16"] = halved(accelerator), halved_by_hand(list(even)[rank::2], scale)
    data = {"a": [1, 2, 3], "b": ("x", "y", "z")}
    with PartialState().split_between_processes(data, apply_padding=True) as share:
        seen["share"] = share
    seen["untouched"] = data == {"a": [1, 2, 3], "b": ("x", "y", "z")}
    accelerator.end_training()
    return seen


def test_alone() -> None:
    ranks = run_ranks(on_each_rank)
    assert [seen["processes"] for seen in ranks] == [2, 2]
    assert [seen["joined"][0][0] for seen in ranks] == [3, 2] and ranks[0]["joined"][0][1]
    for seen in ranks:
        for name in ("joined", "fp16"):
            (ours, weights), (by_hand, wanted) = seen[name]
            assert ours == by_hand and weights == pytest.approx(wanted, rel=1e-6), name
        assert True in seen["fp16"][0][0] and False in seen["fp16"][0][0]
        assert seen["untouched"]
    assert [seen["share"] for seen in ranks] == [
        {"a": [1, 2], "b": ("x", "y")},
        {"a": [3, 3], "b": ("z", "z")},
    ]
