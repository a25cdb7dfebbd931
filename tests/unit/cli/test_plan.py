"""What the plan of a launch by the command line says of devices."""

from __future__ import annotations

import dataclasses

import pytest

from notebook_accel import devices
from tests.unit.cli.test_launch import plan_of


def test_one_device_that_is_named_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    two = dataclasses.replace(devices.CUDA, counter=lambda: 2)
    monkeypatch.setattr(devices, "KINDS", (two, devices.CPU))
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    assert plan_of().config.num_processes == 2
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    found = plan_of()
    assert (found.config.num_processes, found.doubts) == (1, ())
    (doubt,) = plan_of("--num_processes", "2").doubts
    assert "ACCELERATE_TORCH_DEVICE='cuda:1' names one device" in str(doubt)
