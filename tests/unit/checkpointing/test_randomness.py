"""Random states of devices, played by one that torch does not have here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel.checkpointing import randomness

CPU = torch.device("cpu")
STATE = torch.arange(4, dtype=torch.uint8)


class Devices:
    """Stands for `torch.cuda` on a machine with two GPUs."""

    def __init__(self, *, initialized: bool) -> None:
        self.initialized = initialized
        self.touched = 0
        self.set: list[tuple[int, list[int]]] = []

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 2

    def get_rng_state(self, index: int) -> torch.Tensor:
        self.touched += 1
        return STATE + index

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.touched += 1
        self.set.append((index, state.tolist()))


def test_devices_that_the_process_does_not_use_stay_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Devices(initialized=False)
    monkeypatch.setattr(torch, "cuda", gpus)
    states = randomness.capture(3, CPU)
    derived = randomness.derive({**states, "torch_cuda_manual_seed": [STATE]}, 1, CPU)
    randomness.apply({**states, "torch_cuda_manual_seed": [STATE]}, CPU)
    assert "torch_cuda_manual_seed" not in states and "torch_cuda_manual_seed" not in derived
    assert gpus.touched == 0


@pytest.mark.parametrize(
    ("initialized", "device"), [(True, CPU), (False, torch.device("cuda", 0))], ids=["by the user", "its own"]
)
def test_devices_that_it_uses_are_saved(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, device: Any
) -> None:
    gpus = Devices(initialized=initialized)
    monkeypatch.setattr(torch, "cuda", gpus)
    states = randomness.capture(3, device)
    randomness.apply(states, device)
    assert dict(gpus.set) == {0: [0, 1, 2, 3], 1: [1, 2, 3, 4]}


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
def test_a_process_goes_on_with_the_state_of_its_own_device(
    monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    gpus = Devices(initialized=True)
    monkeypatch.setattr(torch, "cuda", gpus)
    states = randomness.capture(3, torch.device("cuda", before))
    randomness.apply(states, torch.device("cuda", after))
    assert dict(gpus.set)[after] == (STATE + before).tolist()
    gpus.set.clear()
    randomness.apply(states, CPU)  # of one that the user uses
    assert dict(gpus.set) == {0: STATE.tolist(), 1: (STATE + 1).tolist()}
