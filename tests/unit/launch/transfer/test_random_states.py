"""The random states that a worker starts with."""

from __future__ import annotations

import pytest
import torch

from notebook_accel.launch.transfer.random_states import RandomStates


def test_generators_of_devices_get_the_seed_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    try:
        torch.manual_seed(41)
        torch.rand(3)
        states = RandomStates.capture()
        expected = torch.rand(3)
        torch.manual_seed(5)  # what a fresh process has is another one
        seeds: list[int] = []
        monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
        states.restore(forked=False)
        assert torch.equal(torch.rand(3), expected)
        assert seeds == [41], "the generators of GPUs start with it when CUDA is initialised"
    finally:
        torch.set_rng_state(before)
