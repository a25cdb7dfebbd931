"""Ports where nodes of these tests meet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.multiprocess import reserve_port


@pytest.fixture
def port() -> Iterator[int]:
    """A port that nobody else gets as long as the test runs."""
    with reserve_port() as reserved:
        yield reserved
