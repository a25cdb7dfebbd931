"""Kernels with torch_xla, whose runtime computes on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.notebooks.kernel import Kernel, make_event_loop

IMPORTS = """
import os, sys, time, torch
from torch import nn
from notebook_accel import PartialState, notebook_launcher
torch.set_num_threads(1)  # OpenMP's threads would forbid a fork
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch_xla") is not None:
        return
    missing = pytest.mark.skip(reason="torch_xla is not installed: make test-xla")
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.stem != "test_cuda_stubs":
            item.add_marker(missing)


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that the tests of a module share; its own runtime is not started."""
    started = Kernel(tmp_path_factory.mktemp("kernel"), PJRT_DEVICE="CPU")
    started.run(IMPORTS, timeout=120).ok()
    # torch_xla keeps a temp folder from its import on, so this is none of a test's
    first = "notebook_launcher(int, engine='xla'); 'torch_xla' in sys.modules"
    assert started.run(first, timeout=120).ok().value == "True", "a launch imports it once for all"
    started.run("import torch_xla").ok()
    yield started
    started.close()


@pytest.fixture(scope="module")
def used_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that has computed on its XLA device."""
    started = Kernel(tmp_path_factory.mktemp("used"), PJRT_DEVICE="CPU")
    started.run(
        f"{IMPORTS}\nimport torch_xla\nmine = torch.ones(3, device='xla') + 1; mine.sum().item()", timeout=120
    ).ok()
    yield started
    started.close()
