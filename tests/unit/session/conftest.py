"""A worker's variables for the tests of what runs in it."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The variables of a worker, in this process."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    monkeypatch.setitem(sys.modules, "__main__", module)
    yield module.__dict__
    loop = module.__dict__.get("__loop__")
    if loop is not None:
        loop.close()
