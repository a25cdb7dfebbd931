"""Tests for hosted notebooks: the signs of Kaggle and Colab, and what a launch does on the machines that they offer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from notebook_accel import probes, tpu
from notebook_accel.diagnosis import checks, environment, hosted
from notebook_accel.launch.checks import fork_obstacles, fork_safety, xla_runtime

HAS_MODULE = probes.has_module
SIGNS = ("KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE", "COLAB_RELEASE_TAG")
CHOICES = (
    "PJRT_DEVICE",
    "ISTPUVM",
    "TPU_NAME",
    "TPU_ACCELERATOR_TYPE",
    "TPU_PROCESS_BOUNDS",
    "TPU_VISIBLE_CHIPS",
)
ASKED = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "RANK", "WORLD_SIZE")
T4 = environment.Gpu(name="Tesla T4", memory="15360 MiB", driver="550.54")


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a sign, a GPU or a TPU, in a process that may be forked."""
    for name in (*SIGNS, *CHOICES, *ASKED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hosted, "_FOLDER", tmp_path / "content")
    monkeypatch.setattr(tpu, "_ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(hosted, "gpus", lambda: ())
    monkeypatch.setattr(fork_obstacles, "reasons", list)
    monkeypatch.setattr(probes, "has_module", lambda name: False)


def attach(monkeypatch: pytest.MonkeyPatch, root: Path, model: str, chips: int) -> None:
    """Attach a TPU as Kaggle's machines show one."""
    known = probes.is_available
    monkeypatch.setattr(probes, "is_available", lambda name: name == "torch_xla" or known(name))
    monkeypatch.setenv("ISTPUVM", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", model)
    (root / "dev").mkdir()
    for number in range(chips):
        (root / "dev" / f"accel{number}").touch()


def look(name: str) -> list[checks.Check]:
    return [check for check in checks.run_checks() if check.name == name]


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, ""),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "Kaggle"),
        ({"KAGGLE_URL_BASE": "https://www.kaggle.com"}, "Kaggle"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "Google Colab"),
        ({"COLAB_RELEASE_TAG": "release-colab", "KAGGLE_KERNEL_RUN_TYPE": "Batch"}, "Kaggle"),
    ],
)
def test_places_by_their_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert hosted.find_place() == place
    assert [check.text.partition(":")[0] for check in look("place")] == [place] * bool(place)


def test_colab_by_its_module_and_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "has_module", lambda name: name == "google.colab")
    assert hosted.find_place() == "", "the module can be installed anywhere"
    (tmp_path / "content").mkdir()
    assert hosted.find_place() == "Google Colab"


def test_without_an_accelerator_the_menu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    (place,), (launch,) = look("place"), look("launch")
    assert (
        place.text.endswith("Runtime > Change runtime type has GPUs and TPUs") and "CPU cores" in place.text
    )
    assert launch.text == "notebook_launcher(train) says: Launching train on 1 CPU process, this one."


@pytest.mark.parametrize(("name", "value"), [("ACCELERATE_USE_CPU", "1"), ("ACCELERATE_TORCH_DEVICE", "cpu")])
def test_who_asks_for_the_cpu_is_sent_to_no_menu(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    monkeypatch.setenv(name, value)
    (place,) = look("place")
    assert "CPU cores" in place.text and "menu" not in place.text and "Runtime" not in place.text


@pytest.mark.parametrize(
    "variables",
    [
        {"COLAB_RELEASE_TAG": "x", "ISTPUVM": "1"},
        {"KAGGLE_KERNEL_RUN_TYPE": "x", "ISTPUVM": "1"},
        {"COLAB_RELEASE_TAG": "x", "PJRT_DEVICE": "TPU"},
    ],
)
def test_a_tpu_without_torch_xla_has_one_remedy_and_no_menu(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    known = probes.is_available
    monkeypatch.setattr(probes, "is_available", lambda name: name != "torch_xla" and known(name))
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    (place,), (launch,), (torch_xla,) = look("place"), look("launch"), look("torch_xla")
    assert "a TPU (chips: 1), " in place.text and "has GPUs and TPUs" not in place.text
    assert (launch.status, torch_xla.status) == ("problem", "problem")
    assert torch_xla.remedy == tpu.advise_install(torch.__version__) and torch_xla.remedy in launch.text


@pytest.mark.parametrize("asked", ["cuda", "cuda:3", "xpu"])
def test_a_device_that_is_not_here_is_a_problem(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "x")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", asked)
    (place,), (launch,) = look("place"), look("launch")
    assert place.text.startswith("Kaggle: ") and "GPU, " not in place.text and " 0 " not in place.text
    assert place.text.endswith("Settings > Accelerator has GPUs and TPUs")
    assert launch.status == "problem"
    assert f"ACCELERATE_TORCH_DEVICE='{asked}': this machine has no " in launch.text


def test_a_torch_xla_that_cannot_be_imported_stops_launches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = probes.version
    monkeypatch.setattr(
        probes, "version", lambda name: torch.__version__ if name == "torch_xla" else known(name)
    )
    broken = tmp_path / "broken" / "torch_xla"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libtpu.so: cannot open')")
    monkeypatch.setenv("PYTHONPATH", str(broken.parent))
    attach(monkeypatch, tmp_path, "v5e-1", 1)
    (launch,), (torch_xla,) = look("launch"), look("torch_xla")
    assert (torch_xla.status, launch.status) == ("problem", "problem")
    assert "(ImportError: libtpu.so: cannot open)" in torch_xla.text and torch_xla.text in launch.text
    (broken / "__init__.py").write_text("")
    assert [look(name)[0].status for name in ("launch", "torch_xla")] == ["ok", "ok"]


def test_two_gpus_get_a_process_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(hosted, "gpus", lambda: (T4, T4))
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    (place,), (launch,) = look("place"), look("launch")
    assert place.text.startswith("Kaggle: 2 CUDA GPUs (Tesla T4), ") and "Settings" not in place.text
    assert launch.status == "ok"
    how = "forked" if fork_safety.choose_start_method(()) == "fork" else "fresh"
    assert f"Launching train on 2 CUDA GPU processes ({how})." in launch.text


def test_eight_chips_get_a_process_each_and_nothing_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> bool:
        raise AssertionError("torch_xla was imported")

    monkeypatch.setattr(xla_runtime, "load", refuse)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    attach(monkeypatch, tmp_path, "v5litepod-8", 8)
    (place,), (launch,) = look("place"), look("launch")
    assert place.text.startswith("Kaggle: 8 XLA devices (v5litepod-8), ")
    assert "Launching train on 8 XLA device processes (" in launch.text


def test_one_chip_is_used_by_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLAB_RELEASE_TAG", "release-colab")
    attach(monkeypatch, tmp_path, "v5e-1", 1)
    assert look("launch")[0].text.endswith("Launching train on 1 XLA device process, this one.")


def test_chips_of_two_devices_need_another_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attach(monkeypatch, tmp_path, "v3-8", 4)
    assert "4 XLA devices (v3-8), each chip 2 devices" in hosted.describe_machine()
    (launch,) = look("launch")
    assert (launch.status, "tpu_mode='spmd' uses all of them" in launch.text) == ("problem", True)


def test_a_launch_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (launch,) = look("launch")
    assert (launch.status, "this process is rank 0 of a run of 2" in launch.text) == ("problem", True)


def test_a_module_inside_a_package_is_found() -> None:
    found = [HAS_MODULE(name) for name in ("xml.dom.pulldom", "xml.nothing", "nothing9.inside")]
    assert found == [True, False, False]
