"""FSDP on a CUDA device: a mesh of one, weights kept on the CPU, and checkpoints that an unsharded run reads."""

from __future__ import annotations

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.usefixtures("on_gpu")

TRAIN = """
from notebook_accel import FullyShardedDataParallelPlugin

def is_linear(module):
    return isinstance(module, torch.nn.Linear)

def train(folder, save=True, precision="no", sharded=True, **options):
    plugin = None
    if sharded:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy=is_linear, **options)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision=precision)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not save:
        accelerator.load_state(folder)
    x = torch.linspace(-1, 1, 8 * 32, device=accelerator.device).reshape(8, 32)
    losses = []
    for _ in range(4):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 3))
    if save:
        accelerator.save_state(folder)
    places = sorted({parameter.device.type for parameter in model.parameters()})
    sharded = type(next(model.parameters())).__name__
    accelerator.end_training()
    return losses, places, sharded
"""


@pytest.fixture(scope="module")
def kernel(shared: Kernel) -> Kernel:
    """One for all: each run is the kernel's own process, and leaves nothing to the next."""
    return shared


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_device_gives_the_losses_of_an_unsharded_run(kernel: Kernel, precision: str) -> None:
    kernel.run(TRAIN).ok()
    cell = kernel.run(
        f"""
        call = lambda: train("plain {precision}", precision="{precision}", sharded=False)
        plain = notebook_launcher(call, num_processes=1)
        shared = notebook_launcher(lambda: train("shared {precision}", precision="{precision}"), num_processes=1)
        near = all(abs(a - b) <= 0.05 * abs(a) + 0.01 for a, b in zip(plain[0], shared[0]))
        near, plain[2], shared[1:]
        """
    ).ok()
    assert " ".join(cell.value.split()) == "(True, 'Parameter', (['cuda'], 'DTensor'))"


def test_weights_wait_on_the_cpu_and_any_run_goes_on(kernel: Kernel) -> None:
    kernel.run(TRAIN).ok()
    cell = kernel.run(
        """
        first = notebook_launcher(lambda: train("kept", cpu_offload=True), num_processes=1)
        there = notebook_launcher(lambda: train("kept", save=False), num_processes=1)
        plain = notebook_launcher(lambda: train("kept", save=False, sharded=False), num_processes=1)
        first[1], there[0] == plain[0], there[0][0] < first[0][0], plain[2]
        """
    ).ok()
    assert " ".join(cell.value.split()) == "(['cpu'], True, True, 'Parameter')"
