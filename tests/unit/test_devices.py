"""Device kinds, found without initialising a device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from notebook_accel import devices, probes
from notebook_accel.config import basic
from notebook_accel.state import DistributedType
from tests.unit.default_device import make_default


def test_counting_initialises_nothing() -> None:
    script = (
        "from notebook_accel import devices; [devices.count(kind) for kind in devices.KINDS]; devices.best();"
        "import torch; assert not torch.cuda.is_initialized(); assert devices.list_initialized() == []"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def test_the_best_kind_has_a_device() -> None:
    assert devices.count(devices.best()) > 0
    assert devices.count("cpu") == 1


def test_the_default_device_is_found_however_it_was_set() -> None:
    cpu = torch.device("cpu")
    assert devices.find_default() == cpu
    with torch.device("meta"):
        assert devices.find_default() == torch.device("meta")
    with make_default("meta"):
        assert devices.find_default() == torch.device("meta")
    assert devices.find_default() == cpu
    torch.set_default_device(None)
    assert devices.find_default() == cpu
    with make_default("cpu"):
        pass


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
    with pytest.raises(ValueError, match=r"xla, cuda, xpu, npu, .* mps, cpu"):
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
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


class Accelerators:
    """Stands for the module that the maker of a device adds to torch."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 4


@pytest.mark.parametrize("kind", devices.EXTENSIONS, ids=lambda kind: kind.name)
def test_devices_of_other_makers(monkeypatch: pytest.MonkeyPatch, kind: devices.DeviceKind) -> None:
    assert kind.counter() == 0
    monkeypatch.setattr(torch, kind.name, Accelerators(), raising=False)
    assert devices.best(use_cpu=False) is kind is devices.kind_of(kind.name)
    assert devices.count(kind) == 4 and devices.list_initialized() == [kind.name]
    assert kind.both_backends == f"cpu:gloo,{kind.name}:{kind.backend}"
    assert DistributedType(kind.distributed_type) == f"MULTI_{kind.name.upper()}"
    assert basic.fitting_types()[:2] == ("NO", kind.distributed_type)
    assert basic.detect().num_processes == 4


def test_an_accelerator_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mtia` is a device of torch itself, of which there is no row."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    kind = devices.best(use_cpu=False)
    assert kind == devices.kind_of("mtia") and devices.device_for(kind, 3) == torch.device("mtia", 1)
    assert kind.distributed_type == "MULTI_GPU" and kind.backend is None
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert devices.best(use_cpu=False) is devices.CPU
