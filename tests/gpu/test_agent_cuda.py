"""A kernel that has used CUDA may not be forked: its agent starts workers, which use the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.usefixtures("on_gpu")

USE = "weights = torch.ones(256, 256, device='cuda')\nsecret = (weights @ weights).sum().item()"
LAUNCH = """
def share():  # gloo between the processes, which share the device by hand
    import __main__
    tensor = torch.full((2,), float(os.environ["RANK"]), device="cuda")
    total = Accelerator().reduce(tensor.cpu(), "sum")
    return tensor.sum().item(), total.tolist(), hasattr(__main__, "secret")
environment = {"ACCELERATE_USE_CPU": "1"}
notebook_launcher(share, num_processes=2, returns="all", environment=environment)
"""
VALUE = "[(0.0, [1.0, 1.0], False), (2.0, [1.0, 1.0], False)]"


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel in which nothing is imported."""
    started = Kernel(tmp_path)
    yield started
    started.close()


def has_agent(kernel: Kernel) -> bool:
    return kernel.run("len(__import__('notebook_accel').runtime.agents())").ok().value == "1"


def test_the_agent_serves_launches_once_cuda_was_used(kernel: Kernel) -> None:
    assert has_agent(kernel)
    kernel.run(USE).ok()
    for _ in range(2):
        cell = kernel.run(LAUNCH, timeout=120).ok()
        assert "(fresh)" in cell.stdout
        assert " ".join(cell.value.split()) == VALUE
        assert kernel.run("torch.equal(weights, torch.ones_like(weights))").ok().value == "True"


def test_there_is_an_agent_where_cuda_came_first(bare: Kernel) -> None:
    bare.run(f"import os, torch\n{USE}").ok()
    bare.run("from notebook_accel import Accelerator, notebook_launcher, runtime").ok()
    assert has_agent(bare)
    cell = bare.run(LAUNCH, timeout=120).ok()
    assert "(fresh)" in cell.stdout and " ".join(cell.value.split()) == VALUE


def test_a_session_of_a_used_kernel_uses_the_device(kernel: Kernel) -> None:
    kernel.run(USE).ok()
    kernel.run(
        """
        from notebook_accel import Session
        session = Session(2, environment={"ACCELERATE_USE_CPU": "1"})
        def place(value):
            global kept
            kept = torch.full((4,), float(value), device="cuda")
            return kept.device.type
        """,
        timeout=120,
    ).ok()
    both = "session.run(place, 3, returns='all'), session.run(lambda: kept.sum().item(), returns='all')"
    cell = kernel.run(both, timeout=120).ok()
    assert cell.value == "(['cuda', 'cuda'], [12.0, 12.0])"
    kernel.run("session.close()").ok()
