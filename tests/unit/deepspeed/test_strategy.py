"""What a strategy leaves that could not be made."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, DeepSpeedPlugin
from notebook_accel.deepspeed import library


def test_a_library_that_is_missing_leaves_nothing(
    clean_runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(library, "probes", SimpleNamespace(is_available=lambda name: False))
    with pytest.raises(ImportError, match="DeepSpeed is not installed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
    assert "LOCAL_RANK" not in os.environ


def test_a_library_that_fails_leaves_no_group(clean_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no backend")

    comm = SimpleNamespace(is_initialized=lambda: False, init_distributed=refuse)
    groups = SimpleNamespace(_WORLD_GROUP=None)
    fake = SimpleNamespace(
        comm=comm, ops=SimpleNamespace(__compatible_ops__={}), utils=SimpleNamespace(groups=groups)
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)
    monkeypatch.setattr(library, "probes", SimpleNamespace(is_available=lambda name: True))
    with pytest.raises(OSError, match="no backend"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
    assert "LOCAL_RANK" not in os.environ
    assert not torch.distributed.is_initialized()
