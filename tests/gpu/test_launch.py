"""Launches on CUDA devices; each test launches from a fresh interpreter, since a kernel may not have used them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

pytestmark = pytest.mark.gpu

WORK = """
import torch
from notebook_accel import Accelerator, notebook_launcher

def work():
    accelerator = Accelerator()
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.autocast():
        output = model(torch.rand(4, 8, device=accelerator.device))
    accelerator.backward(output.float().square().mean())
    optimizer.step()
    weight = accelerator.unwrap_model(model).weight
    return weight.device.type, str(output.dtype), accelerator.num_processes, weight.detach()
"""


def run(script: str) -> str:
    text = WORK + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_process_uses_the_gpu() -> None:
    assert "cuda torch.float32 1" in run("print(*notebook_launcher(work, num_processes=1)[:3])")


def test_mixed_precision_reaches_the_function() -> None:
    call = 'notebook_launcher(work, num_processes=1, mixed_precision="bf16")'
    assert "cuda torch.bfloat16 1" in run(f"print(*{call}[:3])")


def test_a_fresh_process_is_used_once_cuda_is() -> None:
    """One device holds only one rank of nccl, so this launch stays on one process, but not in this one."""
    script = """
    torch.ones(1, device="cuda")
    import os
    pid = notebook_launcher(os.getpid, num_processes=1, start_method="forkserver")
    print("other" if pid != os.getpid() else "same")
    """
    assert "other" in run(script)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("before", ["", "torch.ones(1, device='cuda')"], ids=["clean", "cuda_used"])
def test_two_processes_use_two_gpus(before: str) -> None:
    script = f"""
    {before}
    kind, dtype, world, weight = notebook_launcher(work, num_processes=2)
    print(kind, world, weight.device)
    """
    assert "cuda 2 cpu" in run(script)
