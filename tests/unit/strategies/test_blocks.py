"""Blocks that compute their activations again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel.strategies import blocks


def test_a_run_on_the_cpu_pins_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would initialise a GPU of the machine in each rank."""
    pins: list[bool] = []
    real = torch.autograd.graph.save_on_cpu

    def note(pin_memory: bool = False, **kwargs: Any) -> Any:
        pins.append(pin_memory)
        return real(pin_memory=False, **kwargs)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", note)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    block = torch.nn.Linear(2, 2)
    blocks.recompute([block], offload=torch.device("cpu"))
    with torch.no_grad():
        block(torch.ones(1, 2))
    block(torch.ones(1, 2)).sum().backward()
    assert pins == [False] and block.weight.grad is not None
