"""Ports where nodes of these tests meet, and patience with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from notebook_accel.launch.engines.nodes import coordinator
from tests.ports import reserve_port


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets as long as the test runs."""
    with reserve_port() as reserved:
        yield reserved


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a coordinator wait for what nodes say, which takes seconds where this process stands still."""
    for name in ("_PROOF_SECONDS", "_SETTLE_SECONDS"):
        monkeypatch.setattr(coordinator, name, 600.0)
