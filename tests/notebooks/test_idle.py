"""What the first launch needs is imported while the kernel has nothing to do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel

pytestmark = pytest.mark.notebook

PATIENCE = 60.0
IS_THERE = "'notebook_accel.widgets.run.view' in sys.modules and 'ipywidgets' in sys.modules"
LAUNCH = """
before = set(sys.modules)
notebook_launcher(lambda: None, num_processes=2, start_method="fork")
[name for name in sys.modules if name not in before]
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    started = Kernel(tmp_path, NOTEBOOK_ACCEL_VIEW="widget", NOTEBOOK_ACCEL_AGENT="false")
    with contextlib.closing(started):
        yield started


def wait_for(kernel: Kernel, value: str) -> None:
    """Ask a kernel until a value is True; each question begins the wait of the kernel anew."""
    deadline = time.monotonic() + PATIENCE
    seconds = 0.5
    while kernel.run(value).ok().value != "True":
        assert time.monotonic() < deadline
        time.sleep(seconds)
        seconds *= 1.5


def test_a_launch_imports_nothing(kernel: Kernel) -> None:
    kernel.run("import sys, torch\nfrom notebook_accel import notebook_launcher").ok()
    wait_for(kernel, IS_THERE)
    assert kernel.run(LAUNCH).ok().value == "[]"
    elastic = "[name for name in sys.modules if name.startswith('torch.distributed.elastic')]"
    assert kernel.run(elastic).ok().value == "[]", "one machine alone needs no agent"


@pytest.mark.not_on("darwin", "it is imported in advance on Linux alone")
def test_nor_does_one_that_trains(kernel: Kernel) -> None:
    kernel.run("import sys, torch\nfrom notebook_accel import notebook_launcher").ok()
    wait_for(kernel, IS_THERE)
    time.sleep(1.5)  # more than it waits until it looks
    assert kernel.run("'torch._dynamo' in sys.modules").ok().value == "False", "nothing trains"
    kernel.run("def train():\n    torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)").ok()
    wait_for(kernel, "'torch._dynamo' in sys.modules")
    assert kernel.run(LAUNCH.replace("lambda: None", "train")).ok().value == "[]"
