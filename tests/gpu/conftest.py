"""Tests that need a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.notebooks.kernel import Kernel, make_event_loop

IMPORTS = "import os, torch\nfrom notebook_accel import Accelerator, debug_launcher, notebook_launcher"


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of the test's own, with the usual imports done."""
    started = Kernel(tmp_path)
    started.run(IMPORTS).ok()
    yield started
    started.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; pytest hands over those of all folders."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
