"""Launches on a machine with a CUDA device, from real kernels."""

from __future__ import annotations

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.usefixtures("on_gpu")


def test_counting_devices_initialises_none(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        from notebook_accel import devices
        from notebook_accel.launch.checks import fork_obstacles
        devices.count(devices.best()), torch.cuda.is_initialized(), fork_obstacles.reasons()
        """
    ).ok()
    assert cell.value == f"({_count()}, False, [])"


def _count() -> int:
    import torch

    return torch.cuda.device_count()


def test_the_device_of_a_used_kernel_is_no_obstacle_and_its_cause_is_named(kernel: Kernel) -> None:
    kernel.run("x = 1\ntensor = torch.ones(1).cuda()  # the cause").ok()
    cell = kernel.run(
        """
        def train():
            return os.environ["RANK"]
        debug_launcher(train)
        """
    ).ok()
    assert "(fresh)" in cell.stdout and cell.value == "'0'"
    cell = kernel.run(
        "from notebook_accel.launch.checks import fork_obstacles; print(*fork_obstacles.reasons())"
    ).ok()
    assert "CUDA was initialised" in cell.stdout
    assert "line 2 (tensor = torch.ones(1).cuda()  # the cause)" in cell.stdout


def test_a_forked_worker_may_use_the_device(kernel: Kernel) -> None:
    cell = kernel.run(
        """
        os.environ["ACCELERATE_USE_CPU"] = "1"  # two gloo processes that share the device by hand
        def share():
            accelerator = Accelerator()
            tensor = torch.full((2,), accelerator.process_index, device="cuda")
            return tensor * 2, accelerator.gather(tensor.cpu())
        notebook_launcher(share, num_processes=2, returns="all")
        """
    ).ok()
    assert "(forked)" in cell.stdout
    assert cell.value.count("device") == 0, "results arrive on the CPU"
    assert "tensor([2, 2])" in cell.value and "tensor([0, 0, 1, 1])" in cell.value


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_one_process_trains_on_the_device(kernel: Kernel, precision: str) -> None:
    cell = kernel.run(
        f"""
        def train():
            accelerator = Accelerator()
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            data = [(torch.ones(8), torch.zeros(1))] * 64
            model, optimizer, loader = accelerator.prepare(
                model, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
            losses = []
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
                losses.append(loss.item())
            return accelerator.device.type, x.device.type, losses[-1] < losses[0]
        notebook_launcher(train, num_processes=1, mixed_precision="{precision}")
        """
    ).ok()
    assert cell.value == "('cuda', 'cuda', True)"


def test_more_processes_than_devices_is_said_before_anything_starts(kernel: Kernel) -> None:
    cell = kernel.run(f"notebook_launcher(print, num_processes={_count() + 1})")
    assert cell.error is not None and "so at most" in cell.error[1] and cell.stdout == ""


@pytest.mark.parametrize("before", ["pass", "torch.ones(1, device='cuda')"], ids=["clean", "used"])
def test_two_processes_use_two_devices(kernel: Kernel, before: str) -> None:
    if _count() < 2:
        pytest.skip("this machine has fewer than two CUDA devices")
    kernel.run(before).ok()
    cell = kernel.run(
        """
        def place():
            accelerator = Accelerator()
            total = accelerator.reduce(torch.ones(1, device=accelerator.device))
            return accelerator.device.index, total
        notebook_launcher(place, num_processes=2, returns="all")
        """
    ).ok()
    assert cell.value == "[(0, tensor([2.])), (1, tensor([2.]))]"
