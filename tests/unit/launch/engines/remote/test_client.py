"""What the environment of a host has to be."""

from __future__ import annotations

from typing import Any

import pytest

from notebook_accel.launch.engines.remote.client import Wanted, find_mismatches

WANTED = Wanted(python="3.11", torch="2.13.0", package="0.1", with_ipython=False, takes_over=False)
GOOD = {"python": "3.11.2", "executable": "/p", "torch": "2.13.0+cu128", "notebook_accel": "0.1"}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"python": "3.8.1"}, "is Python 3.8.1, and this process Python 3.11"),
        ({"missing": "torch"}, "does not have torch: install it there"),
        ({"error": "ImportError: no"}, "cannot import notebook_accel (ImportError: no)"),
        ({"torch": "2.8.0"}, "has torch 2.8.0, and this process 2.13.0"),
        ({"notebook_accel": ""}, "has notebook_accel from a folder, and this process 0.1"),
    ],
)
def test_what_does_not_fit_is_told(facts: dict[str, Any], text: str) -> None:
    (problem,) = find_mismatches("gpu1", {**GOOD, **facts}, WANTED)
    assert problem.startswith("host gpu1: /p") and text in problem


def test_builds_of_torch_may_differ() -> None:
    assert not find_mismatches("gpu1", GOOD, WANTED)
