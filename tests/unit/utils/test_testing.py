"""What tests of libraries take: the device, and the marks, as Accelerate has them."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
from accelerate.test_utils import testing as reference

from notebook_accel.takeover import paths
from notebook_accel.utils import testing

MARKS = [name for name in paths.names_of("test_utils.testing") if name.startswith("require_")]


def is_skipped(mark: Any) -> bool:
    class Case(unittest.TestCase):
        def test(self) -> None: ...

    return bool(getattr(mark(Case), "__unittest_skip__", False))


def test_the_device_is_accelerates() -> None:
    kind, number, allocated = testing.get_backend()
    their_kind, their_number, their_allocated = reference.get_backend()
    assert (kind, number, allocated()) == (their_kind, their_number, their_allocated())
    assert (testing.torch_device, testing.device_count) == (kind, number)


@pytest.mark.parametrize("name", [name for name in MARKS if name != "require_torch_min_version"])
def test_the_marks_skip_what_accelerates_skip(name: str) -> None:
    if name == "require_tp":
        pytest.importorskip("transformers", reason="Accelerate asks for its version here")
    assert is_skipped(getattr(testing, name)) == is_skipped(getattr(reference, name))


@pytest.mark.parametrize(("version", "skipped"), [("2.0", False), ("99.0", True)])
def test_a_version_of_torch(version: str, skipped: bool) -> None:
    assert is_skipped(testing.require_torch_min_version(version=version)) is skipped


def test_slow_tests_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert is_skipped(testing.slow) and is_skipped(testing.skip)
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert not is_skipped(testing.slow)


def test_words_of_a_launch() -> None:
    given: dict[str, Any] = {"num_processes": 2, "cpu": True, "multi_gpu": False, "gpu_ids": None}
    assert testing.get_launch_command(**given) == reference.get_launch_command(**given)


@pytest.mark.usefixtures("clean_runtime")
def test_the_same_tensors() -> None:
    assert testing.are_the_same_tensors(torch.ones(2))
