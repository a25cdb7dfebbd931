"""The backends of the process group that the first state opens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from notebook_accel import detect, devices
from notebook_accel.comm import torch_dist
from notebook_accel.devices import DeviceKind
from notebook_accel.state import PartialState

# two processes with a device each that has a backend of its own, as GPUs have; torch computes on the CPU
FAKE = DeviceKind(
    name="cuda", label="GPU", plural="GPUs", backend="nccl", autocast="cuda", indexed=False, counter=lambda: 2
)
BOTH = "cpu:gloo,cuda:nccl"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the backends of the groups that are opened; none is."""
    found: list[str] = []
    monkeypatch.setattr(torch_dist, "open_group", lambda place, backend, **_: found.append(backend))
    monkeypatch.setattr(torch_dist, "TorchComm", lambda *_, **__: None)
    monkeypatch.setattr(devices, "best", lambda *_: FAKE)
    monkeypatch.setattr(devices, "device_for", lambda *_: torch.device("cpu"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the first state chooses
    return found


@pytest.mark.parametrize(
    ("variables", "arguments", "backend"),
    [
        ({}, {}, "nccl"),
        ({"FORK_LAUNCHED": "1"}, {}, BOTH),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, {}, BOTH),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "false"}, {}, "nccl"),
        ({"FORK_LAUNCHED": "1"}, {"backend": "nccl"}, "nccl"),
    ],
)
def test_the_first_state_is_ready_for_offloading(
    clean_runtime: None,
    opened: list[str],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    arguments: dict[str, Any],
    backend: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert PartialState(**arguments).backend == backend
    assert opened == [backend]
    if backend == BOTH:  # an Accelerator that offloads comes later
        detect.ensure(**devices.with_cpu_collectives({}))
