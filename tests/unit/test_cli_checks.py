"""Tests for `notebook-accel env`, `doctor` and `test`, and for what they are made of."""

from __future__ import annotations

import collections
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_accel import devices
from notebook_accel.cli import test as selftest
from notebook_accel.diagnosis import checks, environment
from notebook_accel.launch import kernel_state

Usage = collections.namedtuple("Usage", "total used free")


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "notebook_accel", *arguments],
        env={**os.environ, "HF_HOME": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def config_of(folder: Path, text: str) -> Path:
    path = folder / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what the checks of a name find, beside an empty folder of configs."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def looking(name: str) -> list[checks.Check]:
        return [check for check in checks.checks() if check.name == name]

    return looking


def test_env_says_what_a_bug_report_needs_and_no_secret(tmp_path: Path) -> None:
    config_of(
        tmp_path,
        "num_processes: 3\nenvironment:\n  WANDB_API_KEY: abcdef\n  PROXY: http://me:word@host\n  PLAIN: shown\n",
    )
    variables = {"ACCELERATE_TOKEN": "very", "NCCL_DEBUG": "INFO", "TORCH_URL": "https://u:pass@h/x"}
    done = run(tmp_path, "env", **variables, OTHER_SETTING="no business")
    assert done.returncode == 0, done.stderr
    for text in (
        "notebook_accel:",
        "torch:",
        "Python:",
        "NCCL_DEBUG=INFO",
        "num_processes: 3",
        "PLAIN: shown",
    ):
        assert text in done.stdout
    for text in ("very", "abcdef", "word", "pass", "OTHER_SETTING"):
        assert text not in done.stdout
    found = json.loads(run(tmp_path, "env", "--json", **variables).stdout)
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["packages"]["psutil"] == psutil.__version__
    assert found["start_method"] == ("fork" if sys.platform == "linux" else found["start_method"])


def test_env_shows_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    path = config_of(tmp_path, "num_processes: none of them\n")
    done = run(tmp_path, "env")
    assert done.returncode == 0, done.stderr
    assert f"{path}:1: num_processes 'none of them' is no whole number" in done.stdout


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:word@host/x", "https://(left out)host/x"),
        ("hf_abcdefghijkl and more", "(left out) and more"),
        ("/usr/lib:/lib", "/usr/lib:/lib"),
    ],
)
def test_texts_without_secrets(text: str, shown: str) -> None:
    assert environment.without_secrets(text) == shown


def test_a_healthy_machine_has_no_problem(look: Any) -> None:
    found = list(checks.checks())
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
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limits")
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
    reason = kernel_state.Reason(what="CUDA was initialised", culprit="cell In[3], line 1")
    monkeypatch.setattr(kernel_state, "reasons", lambda: [reason])
    check = look("this process")[0]
    assert (check.status, "CUDA was initialised, first by cell In[3]" in check.text) == ("warning", True)


def test_gpus_that_torch_does_not_see(look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = environment.Gpu(name="A GPU", memory="1 MiB", driver="470.1")
    monkeypatch.setattr(checks, "gpus", lambda: (gpu,))
    monkeypatch.setattr(devices, "count", lambda kind: 0)
    monkeypatch.setattr("torch.version.cuda", None)
    assert "built without CUDA" in look("driver")[0].text
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = look("driver")[0]
    assert (check.status, "driver that knows CUDA 13.0" in check.remedy) == ("problem", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert look("driver")[0].status == "warning"


def test_a_config_that_cannot_be_read_is_a_problem_and_an_exit_code(tmp_path: Path) -> None:
    path = config_of(tmp_path, "num_processes: 0\nmixed_precision: fp4\n")
    done = run(tmp_path, "doctor")
    assert done.returncode == 1
    assert f"problem  default config: {path}:1: num_processes 0 is less than 1 ->" in done.stdout
    assert f"{path}:2: mixed_precision" in done.stdout
    found = json.loads(run(tmp_path, "doctor", "--json").stdout)
    assert [check["status"] for check in found if check["name"] == "default config"] == ["problem"] * 2


def test_a_variable_without_a_legal_value_is_a_problem(
    look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_of(tmp_path, "num_processes: 1\n")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "toaster")
    check = look("default config")[0]
    assert (check.status, "toaster" in check.text) == ("problem", True)


def test_the_self_test_passes_here(tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--num_processes", "3", ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    ") == 5
    for text in (
        "process start: 3 by ",
        "collective: 2 CPU processes by gloo",
        "97 rows",
        "1 and 3 processes",
    ):
        assert text in done.stdout


def test_the_self_test_says_what_failed(tmp_path: Path) -> None:
    done = run(tmp_path, "test", ACCELERATE_USE_CPU="true", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert sum(line.startswith("failed ") for line in done.stdout.splitlines()) == 4
    assert "this process is rank 0 of a run of 2" in done.stdout
    assert "4 of 5 failed: `notebook-accel doctor`" in done.stdout
    wrong = run(tmp_path, "test", ACCELERATE_TORCH_DEVICE="toaster", ACCELERATE_USE_CPU="false")
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (1, False)
    assert "toaster" in wrong.stderr


def test_trials_notice_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = selftest.Machine(num_processes=2, kind=devices.CPU, environment={})

    def answers(*values: Any) -> None:
        monkeypatch.setattr(selftest.Machine, "run", lambda self, *args, **kwargs: list(values))

    answers(0, 0)
    with pytest.raises(AssertionError, match=r"ranks are \[0, 0\], expected \[0, 1\]"):
        selftest._start(machine)
    answers(3.0, 2.0)
    with pytest.raises(AssertionError, match="sums"):
        selftest._collective(machine)
    answers(list(range(50)), list(range(49, 97)))
    with pytest.raises(AssertionError, match="rows of all ranks together"):
        selftest._sharding(machine)
    answers([1.0], [2.0])
    with pytest.raises(AssertionError, match="weights of rank 1"):
        selftest._training(machine)
