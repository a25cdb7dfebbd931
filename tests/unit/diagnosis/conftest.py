"""One answer of torchao for all tests of checks: each would else import it in a process of its own, for seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from notebook_accel.diagnosis import packages


@pytest.fixture(scope="session")
def torchao_problem() -> Callable[[], str]:
    """Ask the first time, and return that answer from then on: nothing that tests of checks play changes it."""
    return functools.cache(packages.find_torchao_problem)


@pytest.fixture(autouse=True)
def _share_torchao_problem(monkeypatch: pytest.MonkeyPatch, torchao_problem: Callable[[], str]) -> None:
    monkeypatch.setattr(packages, "find_torchao_problem", torchao_problem)
