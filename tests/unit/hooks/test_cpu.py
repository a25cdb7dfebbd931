"""The device of models that are on it one after the other."""

from __future__ import annotations

import pytest
import torch

from notebook_accel import devices
from notebook_accel.devices import DeviceKind
from notebook_accel.hooks.cpu import CpuOffload
from notebook_accel.state import PartialState

GPUS = DeviceKind(
    name="cuda", label="GPU", plural="GPUs", backend="nccl", autocast="cuda", indexed=True, counter=lambda: 4
)


def test_each_process_computes_on_its_own_device(
    clean_runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(devices, "best", lambda *_: GPUS)
        for name, value in {
            "RANK": "2",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "2",
            "LOCAL_WORLD_SIZE": "4",
        }.items():
            patched.setenv(name, value)
        assert CpuOffload().execution_device == torch.device("cuda", 2)
    PartialState(cpu=True)
    assert CpuOffload().execution_device == torch.device("cpu"), "that of the process, also without GPUs"
