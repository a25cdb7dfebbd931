"""The processes that serve all tests of libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.libraries import hosts


@pytest.fixture(scope="session")
def served_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, hosts.Host]]:
    """A host for each side. DeepSpeed takes seconds to import, and no job of theirs needs it."""
    with hosts.open_hosts(tmp_path_factory.mktemp("hosts"), left_out=["deepspeed"]) as opened:
        yield opened
