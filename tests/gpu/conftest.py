"""Skips this folder, with a reason, where torch sees no CUDA device."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    reason = f"no CUDA device: torch {torch.__version__} sees none"
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=reason))
