"""TPU chips found by files and variables, and what a launch makes of them; the files are made up."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from notebook_accel import devices, probes, tpu
from notebook_accel.launch import preflight
from notebook_accel.launch.checks import xla_runtime
from notebook_accel.launch.engines import xla
from notebook_accel.launch.job import Job
from notebook_accel.launch.request import LaunchRequest
from tests.structure.source import ROOT

V5E, V3, NETWORK_CARD = "0x0063", "0x0027", "0x0042"
KAGGLE = {"ISTPUVM": "1", "TPU_PROCESS_ADDRESSES": "local", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
COLAB = {"TPU_ACCELERATOR_TYPE": "v5e-1", "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1"}


class Machine:
    """A machine's files, in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def attach(self, device: str, count: int, vendor: str = "0x1ae0") -> None:
        folder = self.root / "sys/bus/pci/devices"
        for number in range(count):
            place = folder / f"{vendor}-{device}-{number}"
            place.mkdir(parents=True)
            (place / "vendor").write_text(f"{vendor}\n")
            (place / "device").write_text(f"{device}\n")

    def make_files(self, *paths: str) -> None:
        for path in paths:
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(tpu, "_ROOT", tmp_path)
    for name in ("PJRT_DEVICE", "ISTPUVM", "TPU_NAME", "TPU_ACCELERATOR_TYPE", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(name, raising=False)
    return Machine(tmp_path)


@pytest.fixture
def torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch_xla count as installed and imported: these tests need none of it.

    Where it is there, importing it would set PJRT_DEVICE to what the machine really has.
    """
    known = probes.is_available
    monkeypatch.setattr(xla_runtime, "load", lambda: False)
    monkeypatch.setattr(probes, "is_available", lambda name: name == "torch_xla" or known(name))


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)


def check(serve: Any = None, **options: Any) -> Job:
    return preflight.check(LaunchRequest(function=print, options=options, serve=serve), "test")[0]


def test_an_ordinary_machine_has_none(machine: Machine, torch_xla: None) -> None:
    machine.attach(NETWORK_CARD, 1)
    machine.attach("0x2330", 8, vendor="0x10de")
    machine.make_files("dev/vfio/12", "dev/accel/accel0")
    assert (tpu.is_here(), tpu.chips(), tpu.pjrt_device()) == (False, 0, "")
    assert devices.count("xla") == 0


@pytest.mark.parametrize(
    ("files", "variables", "chips"),
    [
        ((), {"ISTPUVM": "1", "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1"}, 8),
        (("dev/accel0", "dev/accel1", "dev/accel2", "dev/accel3"), {}, 4),
        (("dev/vfio/vfio", "dev/vfio/0"), {"PJRT_DEVICE": "TPU"}, 1),
        ((), {"TPU_NAME": "mine"}, 1),
        (("dev/accel0",), {"PJRT_DEVICE": "CPU"}, 0),
    ],
)
def test_files_and_variables_tell(
    machine: Machine,
    torch_xla: None,
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[str, ...],
    variables: dict[str, str],
    chips: int,
) -> None:
    machine.make_files(*files)
    set_all(monkeypatch, variables)
    assert tpu.chips() == devices.count("xla") == chips


def test_a_name_alone_is_no_tpu(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "is_available", lambda name: False)
    monkeypatch.setenv("TPU_NAME", "mine")
    assert not tpu.is_here()


def test_kaggle_has_a_process_for_each_chip(
    machine: Machine, torch_xla: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.attach(V5E, 8)
    set_all(monkeypatch, KAGGLE)
    job = check()
    assert job.engine == "xla" and job.local_world_size == 8
    assert job.environment["ACCELERATE_TORCH_DEVICE"] == "xla"
    assert job.environment["NOTEBOOK_ACCEL_TPU_MODE"] == "process"
    assert "ACCELERATE_USE_CPU" not in job.environment
    with pytest.raises(ValueError, match="num_processes=3: a run on XLA devices has 1 process or all 8"):
        check(num_processes=3)
    with pytest.raises(ValueError, match="num_processes=9: this machine has 8 XLA devices"):
        check(num_processes=9)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "0,1")
    with pytest.raises(ValueError, match="TPU_VISIBLE_CHIPS=0,1 has 2 of 8 chips"):
        check()
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "5")
    assert check().local_world_size == 1


def test_colab_runs_in_the_kernel(machine: Machine, torch_xla: None, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.attach(V5E, 1)
    set_all(monkeypatch, COLAB)
    job = check()
    assert job.engine == "inprocess" and job.local_world_size == 1
    assert check(block=False).engine == "xla"


def test_an_old_chip_is_two_devices(
    machine: Machine, torch_xla: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.attach(V3, 4)
    with pytest.raises(ValueError, match=r"2 devices \(v2 and v3\).*tpu_mode='spmd'"):
        check()
    assert check(tpu_mode="spmd").engine == "inprocess"
    one = check(num_processes=1)
    assert one.engine == "xla", "this process would take all chips"


def test_one_process_can_use_all(machine: Machine, torch_xla: None) -> None:
    machine.attach(V5E, 4)
    job = check(tpu_mode="spmd")
    assert job.engine == "inprocess" and job.local_world_size == 1
    assert job.environment["NOTEBOOK_ACCEL_TPU_MODE"] == "spmd"
    assert check(tpu_mode="spmd", engine="xla").engine == "xla"
    with pytest.raises(ValueError, match="num_processes=4"):
        check(tpu_mode="spmd", num_processes=4)
    with pytest.raises(ValueError, match="tpu_mode='threads': choose among 'process', 'spmd'"):
        check(tpu_mode="threads")
    with pytest.raises(ValueError, match="tpu_mode='spmd' with engine='local'"):
        check(tpu_mode="spmd", engine="local")


def test_what_is_missing_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    known = probes.is_available
    monkeypatch.setattr(probes, "is_available", lambda name: name != "torch_xla" and known(name))
    for number in (1, 2):
        with pytest.raises(
            ValueError, match="XLA devices are used by torch_xla, which is not installed"
        ) as caught:
            check(engine="xla", num_processes=number)
        assert "this machine has" not in str(caught.value), "nobody knows how many devices it has"
    machine.attach(V5E, 4)
    with pytest.raises(
        ValueError, match=r"this machine has a TPU, and torch_xla.*pip install .*'torch_xla\[tpu\]~=2\."
    ):
        check(num_processes=2)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    assert check(num_processes=2).engine == "local"


def test_a_tpu_is_needed_or_the_cpu_named(
    machine: Machine, torch_xla: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no TPU was found on this machine; PJRT_DEVICE=CPU"):
        check(engine="xla")
    assert check(engine="xla", environment={"PJRT_DEVICE": "CPU"}).local_world_size == 1
    machine.attach(V5E, 4)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert check(engine="xla", environment={"PJRT_DEVICE": "TPU"}).local_world_size == 4
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert check(engine="xla").local_world_size == 1
    assert check().engine == "inprocess", "torch_xla sets this at its import: nobody asked for XLA"
    assert "ACCELERATE_TORCH_DEVICE" not in check().environment
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with pytest.raises(ValueError, match="CPU_NUM_DEVICES=2: a process has one device"):
        check(engine="xla")
    assert check(tpu_mode="spmd").local_world_size == 1
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU is set, and XLA devices were asked for"):
        check(engine="xla")


def test_sessions_are_for_other_devices(machine: Machine, torch_xla: None) -> None:
    machine.attach(V5E, 4)
    with pytest.raises(
        ValueError, match=r"a session runs on GPUs and CPUs: environment=.'ACCELERATE_USE_CPU'"
    ):
        check(serve=print)
    on_cpus = check(serve=print, num_processes=2, environment={"ACCELERATE_USE_CPU": "true"})
    assert on_cpus.engine == "local"


def test_chips_that_the_kernel_holds_are_named(
    machine: Machine, torch_xla: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.attach(V5E, 4)
    files = tmp_path / "fd"
    files.mkdir()
    for number, path in enumerate(["/dev/null", "/dev/vfio/vfio", "/dev/accel0", "/dev/vfio/2"]):
        (files / str(number)).symlink_to(path)
    monkeypatch.setattr(xla, "_OPEN_FILES", str(files))
    with pytest.raises(ValueError, match=r"holds its chips \(/dev/accel0, /dev/vfio/2\).*restart the kernel"):
        check()


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("2.8.0+cpu", "pip install 'torch_xla[tpu]~=2.8.0',"),
        ("2.9.1", "pip install 'torch_xla[tpu]~=2.9.0',"),
        ("2.13.0+cpu", "pip install 'torch~=2.9.0' 'torch_xla[tpu]~=2.9.0' and start a new kernel,"),
        ("2.7.1", "pip install 'torch~=2.9.0' 'torch_xla[tpu]~=2.9.0' and start a new kernel,"),
    ],
)
def test_torch_xla_is_installed_beside_the_torch_of_its_number(version: str, command: str) -> None:
    assert tpu.advise_install(version).startswith(command)


def test_the_extra_has_the_releases_that_the_advice_names() -> None:
    line = next(
        line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("xla = ")
    )
    for needed in re.findall(r'"(torch[^"]*)"', line):
        wanted = Requirement(needed).specifier
        assert [f"2.{minor}" for minor in range(30) if f"2.{minor}.0" in wanted] == [*tpu.RELEASES]


def test_a_device_that_was_asked_for_is_no_question_of_torch_xla(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = probes.is_available
    monkeypatch.setattr(probes, "is_available", lambda name: name != "torch_xla" and known(name))
    machine.attach(V5E, 4)
    assert check(environment={"ACCELERATE_TORCH_DEVICE": "cpu"}).engine == "inprocess"
    with pytest.raises(
        ValueError, match="ACCELERATE_TORCH_DEVICE='xla': this machine has a TPU, and torch_xla"
    ):
        check(environment={"ACCELERATE_TORCH_DEVICE": "xla"})


def test_who_asks_for_xla_on_the_cpu_gets_one_process(
    machine: Machine, torch_xla: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    job = check(environment={"ACCELERATE_TORCH_DEVICE": "xla"})
    assert (job.local_world_size, job.device_kind) == (1, devices.XLA)
