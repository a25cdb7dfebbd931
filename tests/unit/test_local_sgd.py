"""Local SGD on two processes, beside Accelerate's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from notebook_accel.accelerator import Accelerator
from notebook_accel.local_sgd import LocalSGD
from tests.unit.multiprocess import do_without_deepspeed, run_ranks

STEPS = 5


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(STEPS)
    ]


def train(accelerator: Any, kind: Any, enabled: bool) -> list[list[float]]:
    """Return the weights after each step and after the block."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    with kind(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=enabled) as local:
        for x, y in batches(accelerator.process_index):
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            seen.append(accelerator.unwrap_model(model).weight.flatten().tolist())
        assert local.num_steps == STEPS
    seen.append(accelerator.unwrap_model(model).weight.flatten().tolist())
    return seen


def ranks_local(enabled: bool) -> list[list[float]]:
    return train(Accelerator(), LocalSGD, enabled)


def ranks_theirs(enabled: bool) -> list[list[float]]:
    from accelerate import Accelerator as Theirs
    from accelerate.local_sgd import LocalSGD as TheirLocalSGD

    do_without_deepspeed()
    return train(Theirs(cpu=True), TheirLocalSGD, enabled)


def test_parameters_agree_after_averaging_only_and_are_accelerates() -> None:
    first, second = run_ranks(ranks_local, True)
    agree = [a == pytest.approx(b, abs=1e-7) for a, b in zip(first, second, strict=True)]
    assert agree == [False, True, False, True, False, True]
    for ours, theirs in zip((first, second), run_ranks(ranks_theirs, True), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(other, abs=1e-6)


def ranks_disabled_and_failing() -> tuple[list[list[float]], bool]:
    accelerator = Accelerator()
    disabled = train(accelerator, LocalSGD, False)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(KeyError), LocalSGD(accelerator, model, 8):
        if accelerator.is_main_process:
            raise KeyError("only here: no average may wait for the other")
        raise KeyError
    return disabled, bool(model.require_backward_grad_sync)


def test_disabled_it_is_plain_data_parallelism_and_an_error_waits_for_nobody() -> None:
    (first, syncs), (second, others) = run_ranks(ranks_disabled_and_failing)
    assert all(a == pytest.approx(b) for a, b in zip(first, second, strict=True))
    assert syncs and others


def test_one_process_and_wrong_arguments(clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    assert len(train(accelerator, LocalSGD, True)) == STEPS + 1
    with pytest.raises(ValueError, match="local_sgd_steps=0: at least 1 is needed"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 0)

    class Sharded(type(accelerator._strategy)):  # type: ignore[misc]
        shards_weights = True

    accelerator._strategy = Sharded(accelerator._runtime, accelerator._precision)
    with pytest.raises(NotImplementedError, match="it needs the whole model in every process"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 2)
