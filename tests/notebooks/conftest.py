"""Kernels for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import elsewhere
from tests.notebooks.kernel import Kernel, make_event_loop

IMPORTS = """
import os, sys, time, signal, torch
import torch.distributed as dist
from notebook_accel import notebook_launcher, debug_launcher
torch.set_num_threads(1)  # tests say themselves when the kernel is to use OpenMP's threads
"""


os.environ.setdefault("PYDEVD_USE_FRAME_EVAL", "NO")  # what old kernels' managers set when they start one


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the system does not have that kernels are to believe in."""
    for item in items:
        for mark in item.iter_markers("not_on"):
            *systems, reason = mark.args
            if elsewhere.BELIEVED in systems:
                item.add_marker(pytest.mark.skip(reason=f"not on {elsewhere.BELIEVED}: {reason}"))


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel that the tests of a module share, with the usual imports done."""
    started = Kernel(tmp_path_factory.mktemp("kernel"), is_copy=True)
    started.run(IMPORTS).ok()
    yield started
    started.close()


@pytest.fixture
def fresh_kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of the test's own, with the usual imports done."""
    started = Kernel(tmp_path, is_copy=True)
    started.run(IMPORTS).ok()
    yield started
    started.close()
