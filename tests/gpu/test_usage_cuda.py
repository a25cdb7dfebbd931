"""The memory and load of a GPU, as the view of a run asks the driver for them."""

from __future__ import annotations

import os

import pytest
import torch

from notebook_accel.widgets.run.usage import Meter
from tests.unit.clock import wait_until

pytestmark = pytest.mark.usefixtures("on_gpu")

HELD = 1 << 30


@pytest.mark.parametrize("named", ["number", "uuid"])
def test_the_card_of_a_rank_is_measured(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pynvml")
    monkeypatch.setattr("notebook_accel.widgets.run.usage._INTERVAL", 0.0)
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    card = "0" if named == "number" else uuid
    held = torch.empty(HELD, dtype=torch.uint8, device="cuda:0")
    meter = Meter()
    used = meter.read({0: os.getpid()}, [card])[0]
    assert used.device_memory is not None and HELD <= used.device_memory < torch.cuda.mem_get_info(0)[1]
    factors = torch.rand(8192, 8192, device="cuda:0")

    def is_busy() -> bool:
        for _ in range(20):
            torch.mm(factors, factors)
        torch.cuda.synchronize()
        return (meter.read({0: os.getpid()}, [card])[0].device or 0) > 10

    wait_until(is_busy)
    meter.close()
    del held
