"""Tests that need a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tests.notebooks.kernel import make_event_loop


@pytest.fixture(scope="session", autouse=True)
def _event_loop() -> None:
    make_event_loop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if torch.cuda.device_count() == 0:
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
