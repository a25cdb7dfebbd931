"""Tests for what hinders launches on a machine, each hindrance played."""

from __future__ import annotations

import collections
import os
import shutil
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from notebook_accel import devices, probes
from notebook_accel.diagnosis import checks, environment, packages
from notebook_accel.launch.agent import client
from notebook_accel.launch.checks import fork_obstacles
from tests.ports import reserve_port
from tests.unit.command import config_of

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the checks of a name find, beside an empty folder of configs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def looking(name: str) -> list[checks.Check]:
        return [check for check in checks.run_checks() if check.name == name]

    return looking


def test_a_healthy_machine_has_no_problem(look: Any) -> None:
    found = list(checks.run_checks())
    assert {check.name for check in found} >= {
        "ports",
        "temp folder",
        "network",
        "libraries",
        "default config",
    }
    assert all(check.remedy for check in found if check.status != "ok")
    assert [check.status for check in look("default config")] == ["ok"]


def test_a_taken_port_is_named_with_the_process_that_holds_it(
    look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reserve_port() as port:
        monkeypatch.setenv("MASTER_PORT", str(port))
        with socket.create_server(("", port)):
            check = look("ports")[-1]
        assert check.status == "problem"
        assert f"{port} (MASTER_PORT)" in check.text
        if sys.platform == "linux":
            assert f"by process {os.getpid()} (" in check.text
        assert look("ports")[-1].status == "ok"
    monkeypatch.setenv("MASTER_PORT", "70000")
    assert "is no port" in look("ports")[-1].text


def test_the_port_of_the_config_is_looked_at(look: Any, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        config_of(tmp_path, f"main_process_port: {port}\n")
        assert look("ports")[-1].status == "problem"


@pytest.mark.parametrize(("free", "status"), [(16 << 20, "problem"), (100 << 20, "warning"), (1 << 40, "ok")])
def test_room_for_shared_memory_and_temporary_files(
    look: Any, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1 << 41, 0, free))
    assert [check.status for check in look("temp folder")] == [status]
    if sys.platform == "linux":
        assert [check.status for check in look("shared memory")] == [status]


@pytest.mark.parametrize(
    ("number", "status"), [(100, "problem"), (1000, "warning"), (2000, "ok"), (-1, "ok")]
)
def test_limits(look: Any, monkeypatch: pytest.MonkeyPatch, number: int, status: str) -> None:
    import resource

    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (number, 100_000))
    found = look("limits")
    assert [check.status for check in found] == [status, status]
    assert all("1024" in check.remedy for check in found if status != "ok")


@pytest.mark.parametrize(
    ("text", "status"),
    [("10000", "warning"), ("many", "problem"), ("0", "problem"), ("1", "ok"), ("1,2", "ok")],
)
def test_threads_beside_cores(look: Any, monkeypatch: pytest.MonkeyPatch, text: str, status: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert [check.status for check in look("threads")] == [status]


def test_threads_of_all_processes_of_the_config_count(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "share_of_cores", lambda number: max(1, 8 // number))
    config_of(tmp_path, "num_processes: 4\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    check = look("threads")[0]
    assert (check.status, "4 processes x OMP_NUM_THREADS 3 > 8 cores" in check.text) == ("warning", True)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert look("threads")[0].status == "ok"


def test_an_interface_that_is_not_there(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing9")
    assert look("network")[0].status == "problem"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", next(iter(psutil.net_if_addrs())))
    assert look("network")[0].status == "ok"


def test_a_machine_without_an_address(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    check = look("network")[-1]
    assert (check.status, "no-such-host.invalid" in check.text) == ("warning", True)
    assert "/etc/hosts" in check.remedy


def test_who_made_this_process_unfit_for_forks(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = fork_obstacles.Reason(what="CUDA was initialised", cause="cell In[3], line 1")
    monkeypatch.setattr(fork_obstacles, "reasons", lambda: [reason])
    monkeypatch.setattr(client, "find", lambda: None)
    check = look("this process")[0]
    assert (check.status, "CUDA was initialised, first by cell In[3]" in check.text) == ("warning", True)
    monkeypatch.setattr(client, "find", lambda: SimpleNamespace(pid=7, is_ready=True))
    agent, check = look("this process")
    assert "an agent, process 7," in agent.text
    assert (check.status, "launches start fresh processes" in check.text) == ("ok", True)


def test_gpus_that_torch_does_not_see(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = environment.Gpu(name="A GPU", memory="1 MiB", driver="470.1")
    monkeypatch.setattr(checks, "gpus", lambda: (gpu,))
    monkeypatch.setattr(devices, "count", lambda kind: 0)
    monkeypatch.setattr("torch.version.cuda", None)
    assert look("driver")[0].text.startswith(
        f"driver 470.1, 1 GPU, but torch {torch.__version__} is built without"
    )
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = look("driver")[0]
    assert (check.status, "driver that knows CUDA 13.0" in check.remedy) == ("problem", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look("driver")[0].status == "warning"


def test_a_variable_without_a_legal_value_is_a_problem(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_of(tmp_path, "num_processes: 1\n")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "toaster")
    check = look("default config")[0]
    assert (check.status, "toaster" in check.text) == ("problem", True)


def test_required_libraries_that_do_not_work(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensor: torch.Tensor) -> Any:
        raise RuntimeError("Numpy is not available")

    due = [
        Requirement(text)
        for text in ("numpy>=1.26", "nbclient>=0.5", "pyyaml>=6", "ruamel.yaml>=0.18", "torch>=99")
    ]
    monkeypatch.setattr(packages, "find_due", lambda: due)
    assert not look("imports")
    monkeypatch.setattr(torch.Tensor, "numpy", refuse)
    monkeypatch.setitem(sys.modules, "nbclient", None)
    numpy, nbclient = look("imports")
    assert numpy.status == nbclient.status == "problem"
    assert numpy.text == "numpy cannot be used (RuntimeError: Numpy is not available)"
    assert nbclient.text.startswith("nbclient cannot be used (ModuleNotFoundError: ")
    assert numpy.remedy.endswith("pip install --force-reinstall 'numpy>=1.26'")


def test_torch_xla_has_to_be_of_torchs_release(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(version: str | None) -> None:
        monkeypatch.setattr(probes, "version", lambda name: version if name == "torch_xla" else None)

    monkeypatch.setattr("torch.__version__", "2.8.0+cpu")
    monkeypatch.setattr(packages, "find_torch_xla_problem", str)
    install("2.8.1")
    assert [check.status for check in look("torch_xla")] == ["ok"]
    install("2.9.0")
    (check,) = look("torch_xla")
    assert (check.status, "built for torch 2.9" in check.text) == ("problem", True)
    assert "torch==2.9.*" in check.remedy
    install(None)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.delenv("ISTPUVM", raising=False)
    assert look("torch_xla") == []
    monkeypatch.setenv("ISTPUVM", "1")  # as Kaggle's TPU machines
    (check,) = look("torch_xla")
    assert (check.status, "torch_xla[tpu]~=2.8.0" in check.remedy) == ("problem", True)


def test_broken_widgets_are_told(look: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (check,) = look("view")
    assert check.status == "ok" and "shows runs in notebooks" in check.text
    for text, reason in (
        ("raise OSError('no\\nfile')", "OSError: no file"),
        ("", "is another module of that name"),
    ):
        (tmp_path / "ipywidgets.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "ipywidgets", raising=False)
        (check,) = look("view")
        assert check.status == "warning" and reason in check.text and "shown as text" in check.text
