"""What the first launch needs is imported while the kernel has nothing to do."""

from __future__ import annotations

import time
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
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path, NOTEBOOK_ACCEL_VIEW="widget", NOTEBOOK_ACCEL_STANDBY="false")


def test_a_launch_imports_nothing(kernel: Kernel) -> None:
    kernel.run("import sys, torch\nfrom notebook_accel import notebook_launcher").ok()
    deadline = time.monotonic() + PATIENCE
    seconds = 0.5
    while kernel.run(IS_THERE).ok().value != "True":
        assert time.monotonic() < deadline
        time.sleep(seconds)  # a cell begins the wait anew
        seconds *= 1.5
    assert kernel.run(LAUNCH).ok().value == "[]"
    elastic = "[name for name in sys.modules if name.startswith('torch.distributed.elastic')]"
    assert kernel.run(elastic).ok().value == "[]", "one machine alone needs no agent"
    kernel.close()
