"""Launches on the devices of a machine: restarts, interrupts, hangs, failures, sessions, and which devices are used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.conftest import Machine
from tests.notebooks.kernel import METHODS, ROOT, Kernel, wait_until

ENDS_WITHIN = 45.0
PLACES = """
import time
def place():
    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(1, device=accelerator.device), "sum")
    return accelerator.process_index, accelerator.device.index or 0, total.item()
"""
SCRIPT = """
import json, sys, torch
from notebook_accel import Accelerator, notebook_launcher

def look():
    device = Accelerator().device
    if device.type != "cuda":
        return device.type
    torch.ones(1, device=device) + 1
    return str(torch.cuda.get_device_properties(device).uuid)

if __name__ == "__main__":
    found = notebook_launcher(look, num_processes=int(sys.argv[1]), returns="all")
    print(json.dumps(found if isinstance(found, list) else [found]))
"""


@pytest.fixture(scope="module", autouse=True)
def _places(shared: Kernel) -> None:
    shared.run(PLACES).ok()


def _expect_a_launch(kernel: Kernel, machine: Machine) -> None:
    """Check that nothing is left of what was before, and that the devices can be used again."""
    assert wait_until(lambda: not kernel.children(), 20), kernel.children()
    cell = kernel.run("notebook_launcher(place, num_processes=2, returns='all')").ok()
    second = 1 if machine.kind == "cuda" else 0
    assert cell.value == f"[(0, 0, 2.0), (1, {second}, 2.0)]"


def test_ranks_start_again_with_a_new_group(shared: Kernel, machine: Machine) -> None:
    machine.require(2)
    cell = shared.run(
        """
        def fails_once():
            first = place()
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if attempt == 0:
                if first[0] == 1:
                    raise ValueError("once")
                Accelerator().reduce(torch.ones(1, device=Accelerator().device)).item()  # waits for rank 1
            return attempt, first[2]
        notebook_launcher(fails_once, num_processes=2, max_restarts=1, returns="all")
        """
    ).ok()
    assert cell.value == "[(1, 2.0), (1, 2.0)]" and "restart 1 of 1" in cell.stderr
    _expect_a_launch(shared, machine)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_ends_ranks_that_wait_for_others(shared: Kernel, machine: Machine, method: str) -> None:
    machine.require(2)
    shared.run(
        """
        def waits():
            place()
            print("go", flush=True)
            if os.environ["RANK"] == "0":
                Accelerator().reduce(torch.ones(1, device=Accelerator().device)).item()
            time.sleep(100)
        """
    ).ok()
    began = []

    def interrupt() -> None:
        time.sleep(0.5)
        began.append(time.monotonic())
        shared.interrupt()

    cell = shared.run(f"notebook_launcher(waits, num_processes=2, start_method='{method}')", during=interrupt)
    assert cell.error is not None and cell.error[0] == "KeyboardInterrupt", cell.told
    assert time.monotonic() - began[0] < ENDS_WITHIN
    _expect_a_launch(shared, machine)


def test_a_hang_is_reported_and_ends(shared: Kernel, machine: Machine) -> None:
    machine.require(2)
    cell = shared.run(
        """
        def hangs():
            place()
            if os.environ["RANK"] == "0":
                total = Accelerator().reduce(torch.ones(3, device=Accelerator().device), "sum")  # of rank 0
                total.sum().item()  # also of rank 0
            time.sleep(100)  # of rank 1
        notebook_launcher(hangs, num_processes=2, hang_timeout=3, on_hang="raise")
        """
    )
    assert cell.error is not None and cell.error[0] == "HangError", cell.told
    assert cell.seconds < ENDS_WITHIN
    assert "rank 0 has entered all_reduce, rank 1 has not" in cell.error[1]
    rank_0, rank_1 = cell.error[1].partition("rank 1 (process ")[::2]
    assert "of rank 0" in rank_0 and "of rank 1" in rank_1
    backend = "nccl" if machine.kind == "cuda" else "gloo"
    assert re.search(rf"{backend}:all_reduce of 3 Float, number \d+ of default_pg, has not ended", rank_0)
    _expect_a_launch(shared, machine)


def test_a_rank_without_memory_is_shown_and_the_other_ends(shared: Kernel, machine: Machine) -> None:
    machine.require(2)
    cell = shared.run(
        """
        def fills():
            place()
            if os.environ["RANK"] == "1":
                torch.empty(1 << 50, dtype=torch.uint8, device=Accelerator().device)  # too large
            Accelerator().reduce(torch.ones(1, device=Accelerator().device)).item()
        notebook_launcher(fills, num_processes=2)
        """
    )
    name = "OutOfMemoryError" if machine.kind == "cuda" else "RuntimeError"
    assert cell.error is not None and cell.error[0] == name, cell.told
    assert "# too large" in cell.traceback and "rank 1" in cell.told
    assert cell.seconds < ENDS_WITHIN
    _expect_a_launch(shared, machine)


def test_a_session_goes_on_after_a_call_that_half_the_ranks_left(shared: Kernel, machine: Machine) -> None:
    machine.require(2)
    cell = shared.run(
        """
        from notebook_accel import Session, utils
        def half(objects):
            first = place()
            if first[0] == 1:
                raise ValueError("half")
            if objects:
                utils.gather_object([1])
            Accelerator().reduce(torch.ones(1, device=Accelerator().device)).item()
        found = []
        with Session(2) as session:
            for objects in (False, True):
                try:
                    session.run(half, objects)
                except ValueError as error:
                    found.append(str(error))
                found.append([total for *_, total in session.run(place, returns="all")])
                found.append(session.run(lambda: utils.gather_object([os.environ["RANK"]])))
        found
        """
    ).ok()
    assert " ".join(cell.value.split()) == str(["half", [2.0, 2.0], ["0", "1"]] * 2)
    _expect_a_launch(shared, machine)


def test_two_runs_at_once_have_devices_of_their_own(shared: Kernel, machine: Machine, on_gpu: None) -> None:
    machine.require(2)
    cell = shared.run(
        """
        def look():
            device = Accelerator().device
            time.sleep(2)
            return device.index, str(torch.cuda.get_device_properties(device).uuid)
        both = [notebook_launcher(look, num_processes=1, block=False) for _ in range(2)]
        found = [run.result() for run in both]
        [index for index, _ in found], len({uuid for _, uuid in found})
        """
    ).ok()
    assert cell.value == "([0, 0], 2)"


BEFORE = {
    "asked": "torch.cuda.is_available()",
    "no NVML": """
import sys
sys.modules["pynvml"] = None
torch.cuda._raw_device_count_nvml = lambda: -1
from notebook_accel import devices
assert devices.count("cuda") == torch._C._cuda_getDeviceCount()
""",
}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_a_kernel_that_only_asked_for_devices_is_not_forked(
    kernel: Kernel, machine: Machine, on_gpu: None, before: str
) -> None:
    """To ask CUDA starts its driver, which no fork can use; to ask NVML does not."""
    kernel.run("os.environ.pop('PYTORCH_NVML_BASED_CUDA_CHECK', None)\n" + before).ok()
    cell = kernel.run(
        """
        os.environ["ACCELERATE_USE_CPU"] = "1"  # two gloo processes that share the device by hand
        def share():
            return (torch.ones(1, device="cuda") + Accelerator().process_index).item()
        notebook_launcher(share, num_processes=2, returns="all"), torch.cuda.is_initialized()
        """
    ).ok()
    assert "(fresh)" in cell.stdout and cell.value == "([1.0, 2.0], False)"
    if machine.count > 1:
        kernel.run("del os.environ['ACCELERATE_USE_CPU']\n" + PLACES).ok()
        cell = kernel.run("notebook_launcher(place, num_processes=2, returns='all')").ok()
        assert cell.value == "[(0, 0, 2.0), (1, 1, 2.0)]"


def _look(folder: Path, visible: str | None, num_processes: int) -> list[str]:
    """Return the device of each process of a launch from a script that sees these devices."""
    script = folder / "look.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    ended = subprocess.run(
        [sys.executable, str(script), str(num_processes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_without_visible_devices_the_cpu_is_used(tmp_path: Path) -> None:
    assert _look(tmp_path, "", 2) == ["cpu", "cpu"]


def test_the_order_of_visible_devices_counts(tmp_path: Path, machine: Machine, on_gpu: None) -> None:
    machine.require(2)
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = asked.split(",") if asked else ["0", "1"]
    first, second = _look(tmp_path, f"{names[0]},{names[1]}", 2)
    assert first != second
    assert _look(tmp_path, f"{names[1]},{names[0]}", 2) == [second, first]
    assert _look(tmp_path, names[1], 1) == [second]


def test_a_part_of_a_gpu(tmp_path: Path, on_gpu: None) -> None:
    if shutil.which("nvidia-smi") is None:
        pytest.skip("needs nvidia-smi, which lists the parts of a GPU")
    listed = subprocess.run(
        ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=240, check=True
    ).stdout
    parts = re.findall(r"UUID: (MIG-[^)]+)\)", listed)
    if not parts:
        pytest.skip("needs a GPU that is divided into MIG instances")
    assert len(_look(tmp_path, parts[0], 1)) == 1
    assert len(_look(tmp_path, ",".join(parts), 1)) == 1, "CUDA uses the first one"
