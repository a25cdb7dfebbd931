"""LOMO optimizers, which change weights within the backward pass; a small one stands for the library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel.accelerator import Accelerator
from tests.unit.multiprocess import run_ranks

pytestmark = pytest.mark.usefixtures("clean_runtime")


class Lomo(torch.optim.Optimizer):
    """Plain descent, by the methods that lomo_optim's have: there is no `step`."""

    __module__ = "lomo_optim.lomo"

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), {})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight -= lr * weight.grad
                    weight.grad = None


def prepared(**options: Any) -> tuple[Accelerator, torch.nn.Linear, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return accelerator, *accelerator.prepare(model, Lomo(model))


@pytest.mark.parametrize("steps", [1, 2])
def test_backward_steps_with_the_learning_rate(steps: int) -> None:
    accelerator, model, optimizer = prepared(gradient_accumulation_steps=steps)
    accelerator.backward(model(torch.ones(1)), learning_rate=0.5)
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.item() == 1 - 0.5 / steps
    accelerator.lomo_backward(model(torch.ones(1)), 0.25)
    assert model.weight.item() == 0.75 - 0.5 / steps


def test_a_learning_rate_is_for_lomo_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ImportError, match="pip install lomo-optim"):
        accelerator.backward(model(torch.ones(1)), learning_rate=0.5)
    monkeypatch.setattr("notebook_accel.probes.is_available", lambda name: name == "lomo_optim")
    with pytest.raises(ValueError, match=r"prepared optimizers are \['SGD'\]"):
        accelerator.lomo_backward(model(torch.ones(1)), 0.5)
    assert model.weight.grad is None


def test_a_loss_scale_is_refused() -> None:
    accelerator, model, _ = prepared(mixed_precision="fp16")
    with pytest.raises(ValueError, match="bf16"):
        accelerator.backward(model(torch.ones(1)), learning_rate=0.5)


def ranks_refuse() -> str:
    accelerator, model, _ = prepared()
    try:
        accelerator.backward(model(torch.ones(1)), learning_rate=0.5)
    except ValueError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


def test_several_processes_are_refused() -> None:
    assert all(
        "a LOMO optimizer with several processes (2 processes)" in text for text in run_ranks(ranks_refuse)
    )
