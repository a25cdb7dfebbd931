"""CPU affinity near a GPU; the GPU, its driver and NVML are played."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import affinity, devices, probes
from notebook_accel.affinity import override_numa_affinity, parse_cores, set_numa_affinity
from notebook_accel.state import PartialState

UUID = "GPU-1b2c"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Play a machine of 8 cores with two GPUs, of which the process may use cores 0 to 5; return what it sets."""
    made: list[Any] = []
    for address, cores, uuid in (("0000:0A:00.0", "0-1", "GPU-0"), ("0000:8B:00.0", "4-7", UUID)):
        (tmp_path / "gpus" / address).mkdir(parents=True)
        (tmp_path / "gpus" / address / "information").write_text(
            f"Model: H200\nGPU UUID: \t {uuid}\nBus Type: PCIe\n"
        )
        (tmp_path / "pci" / address.lower()).mkdir(parents=True)
        (tmp_path / "pci" / address.lower() / "local_cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(affinity._ask_files, "__defaults__", (tmp_path / "gpus", tmp_path / "pci"))
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    monkeypatch.setattr(probes, "is_available", lambda name: name == "pynvml" and "pynvml" in sys.modules)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: made.append(cores), raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def play_nvml(monkeypatch: pytest.MonkeyPatch, words: list[int]) -> None:
    nvml: Any = types.ModuleType("pynvml")
    nvml.NVMLError = type("NVMLError", (Exception,), {})
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetHandleByUUID = lambda uuid: 1

    def cores(handle: int, num_words: int) -> list[int]:
        if not words:
            raise nvml.NVMLError("Not Supported")
        return words if handle == 1 else [1]

    nvml.nvmlDeviceGetCpuAffinity = cores
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_the_driver_s_files_tell(two_gpus: list[Any], monkeypatch: Any, capsys: Any) -> None:
    override_numa_affinity(0)
    override_numa_affinity(1, verbose=True)
    assert two_gpus == [{0, 1}, {4, 5}], "only cores that were allowed before"
    assert capsys.readouterr().out == "process 1 runs on 2 cores: 4-5\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{UUID},0")
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    override_numa_affinity(0)
    override_numa_affinity(1)
    assert two_gpus[2:] == [{4, 5}, {0, 1}] and "process 0 runs on 2 cores" in capsys.readouterr().out


def test_nvml_tells(two_gpus: list[Any], monkeypatch: Any) -> None:
    play_nvml(monkeypatch, [0b101 << 2, 1])  # cores 2, 4 and 64
    override_numa_affinity(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", UUID)
    override_numa_affinity(0)
    assert two_gpus == [{2, 4}, {2, 4}]


def test_a_process_that_sees_one_gpu_is_near_that(two_gpus: list[Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    override_numa_affinity(3)
    assert two_gpus == [{4, 5}]


@pytest.mark.parametrize(
    "visible, index, words, sentence",
    [
        ("MIG-7,MIG-8", 1, None, "MIG-8 is a part of a GPU"),
        ("GPU-unknown", 0, None, "pip install nvidia-ml-py"),
        ("", 1, [], "NVML on GPU 1: Not Supported"),
        ("", 1, [1 << 7], r"none of the cores near its GPU \(7\) is open"),
    ],
)
def test_a_sentence_where_nobody_knows(
    two_gpus: list[Any], monkeypatch: Any, visible: str, index: int, words: Any, sentence: str
) -> None:
    if words is not None:
        play_nvml(monkeypatch, words)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.warns(UserWarning, match=f"CPU affinity of process {index} is left as it is: .*{sentence}"):
        override_numa_affinity(index)
    assert two_gpus == []


def test_without_a_gpu(monkeypatch: Any) -> None:
    monkeypatch.setattr(devices, "count", lambda kind: 0)
    with pytest.warns(UserWarning, match="no NVIDIA GPU was found|does not let a process choose"):
        override_numa_affinity(0)
    for wrong in (-1, "0", True):
        with pytest.raises((ValueError, TypeError), match="local_process_index"):
            override_numa_affinity(wrong)  # type: ignore[arg-type]


def test_once_for_each_process(monkeypatch: Any) -> None:
    calls: list[int] = []
    monkeypatch.setattr(affinity, "override_numa_affinity", lambda index, verbose: calls.append(index))
    set_numa_affinity.cache_clear()
    for index in (3, 3, 4):
        set_numa_affinity(index)
    set_numa_affinity.cache_clear()
    assert calls == [3, 4]


@pytest.mark.parametrize("device, expected", [("cuda:0", [0]), ("cpu", [])])
def test_the_environment_asks_for_it(
    clean_runtime: None, monkeypatch: Any, device: str, expected: list[int]
) -> None:
    import torch

    calls: list[int] = []
    monkeypatch.setattr(affinity, "set_numa_affinity", calls.append)
    monkeypatch.setattr(devices, "device_for", lambda kind, rank: torch.device(device))
    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    PartialState()
    assert calls == expected


def test_lists_of_cores() -> None:
    assert parse_cores("0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11} and parse_cores("") == set()
    assert affinity._format_ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    with pytest.raises(ValueError, match="is no list of cores"):
        parse_cores("a-b")
