"""Warnings name the line of the user, whatever lies between."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from notebook_accel import caller, infer_auto_device_map
from notebook_accel.big_modeling import limits
from notebook_accel.fsdp import FullyShardedDataParallelPlugin


def test_the_line_of_a_function_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu = SimpleNamespace(indexed=True, counter=lambda: 1)
    monkeypatch.setattr(limits, "devices", SimpleNamespace(best=lambda use_cpu: one_gpu))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        infer_auto_device_map(torch.nn.Linear(2, 2), max_memory={7: 0, "cpu": 1000})
    assert not [warning for warning in caught if "buffers" in str(warning.message)], "it has none"
    found = [warning for warning in caught if "max_memory names GPU" in str(warning.message)]
    assert [(warning.filename, warning.lineno) for warning in found] == [(__file__, line)]


def test_a_plan_for_gpus_of_another_machine_needs_no_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(
        limits, "devices", SimpleNamespace(best=lambda use_cpu: SimpleNamespace(indexed=False))
    )
    infer_auto_device_map(torch.nn.Linear(2, 2), max_memory={0: 1000, "cpu": 1000})
    assert not [warning for warning in recwarn if "max_memory" in str(warning.message)]


@dataclass
class Derived(FullyShardedDataParallelPlugin):
    """Has a constructor that dataclass makes here."""


@pytest.mark.parametrize("kind", [FullyShardedDataParallelPlugin, Derived])
def test_the_line_of_a_constructor_that_is_generated(kind: type[FullyShardedDataParallelPlugin]) -> None:
    with pytest.warns(UserWarning, match="is not looked at") as caught:
        kind(auto_wrap_policy="no_wrap", min_num_params=7)
    assert caught[0].filename == __file__


def test_the_line_of_code_without_a_file() -> None:
    code = "def f():\n    warn('hello')\nf()\n"
    with pytest.warns(UserWarning, match="hello") as caught:
        exec(code, {"__name__": "__main__", "warn": caller.warn})
    exec(code, {"__name__": None, "warn": caller.warn})  # of which Python itself shows no warnings
    assert (caught[0].filename, caught[0].lineno) == ("<string>", 2)
