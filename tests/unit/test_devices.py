"""Device kinds, found without initialising a device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from notebook_accel import devices, probes


def test_counting_initialises_nothing() -> None:
    script = (
        "from notebook_accel import devices; [devices.count(kind) for kind in devices.KINDS]; devices.best();"
        "import torch; assert not torch.cuda.is_initialized(); assert devices.list_initialized() == []"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_best_kind_has_a_device() -> None:
    assert devices.count(devices.best()) > 0
    assert devices.count("cpu") == 1


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:1")
    assert devices.best() is devices.CUDA
    assert devices.device_for(devices.CUDA, 0) == torch.device("cuda:1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert devices.best() is devices.CPU


@pytest.mark.parametrize("text", ["nonsense", "cuda:x"])
def test_a_wrong_device_names_its_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", text)
    with pytest.raises(ValueError, match="ACCELERATE_TORCH_DEVICE"):
        devices.best()


def test_local_ranks_share_out_the_visible_devices() -> None:
    kind = devices.DeviceKind(
        name="cuda",
        label="GPU",
        plural="GPUs",
        backend="nccl",
        autocast="cuda",
        indexed=True,
        counter=lambda: 2,
    )
    assert [devices.device_for(kind, rank).index for rank in range(3)] == [0, 1, 0]
    assert devices.device_for(devices.CPU, 3) == torch.device("cpu")
    none = devices.DeviceKind(
        name="cuda",
        label="GPU",
        plural="GPUs",
        backend="nccl",
        autocast="cuda",
        indexed=True,
        counter=lambda: 0,
    )
    with pytest.raises(ValueError, match="no GPU was found"):
        devices.device_for(none, 0)


def test_an_unknown_kind_is_answered_with_the_choices() -> None:
    with pytest.raises(ValueError, match="cuda, xpu, mps, cpu"):
        devices.count("abacus")


def test_probes() -> None:
    assert probes.is_available("torch")
    assert not probes.is_available("no_such_module")
    assert probes.at_least("torch", "2.0")
    assert not probes.at_least("torch", "99")
    assert not probes.at_least("no-such-distribution", "0")
    script = (
        "import sys; from notebook_accel import probes; probes.is_available('rich'); "
        "assert 'rich' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
