"""The strategy for XLA devices, as far as it needs no torch_xla."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch

from notebook_accel.strategies.xla import XlaDevice


def test_it_can_be_made_and_copied() -> None:
    runtime: Any = SimpleNamespace(gradient=SimpleNamespace(xla_gradients_synced=False))
    strategy = XlaDevice(runtime, None)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)
    for one in (strategy, copy.deepcopy(strategy)):
        one.follow(optimizer)
        assert not one.runtime.gradient.xla_gradients_synced
