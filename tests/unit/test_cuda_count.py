"""CUDA devices are counted by a copy of the process, which leaves nothing in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from notebook_accel import cuda_count, devices

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
HERE = 99


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with a driver, and a torch built for it that counts 3 devices in any process but this one."""
    control = tmp_path / "nvidiactl"
    control.touch()
    own = os.getpid()
    monkeypatch.setattr(cuda_count, "DRIVER", str(control))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: HERE if os.getpid() == own else 3)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    cuda_count._count_in_copy.cache_clear()
    yield
    cuda_count._count_in_copy.cache_clear()


def test_a_copy_counts_once_and_ends() -> None:
    before = psutil.Process().children()
    assert [devices.count("cuda") for _ in range(2)] == [3, 3]
    assert psutil.Process().children() == before and cuda_count._count_in_copy.cache_info().misses == 1


def test_visible_devices_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.count("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices.count("cuda")
    assert cuda_count._count_in_copy.cache_info().misses == 2


def test_a_process_that_has_the_driver_open_counts_itself() -> None:
    with open(cuda_count.DRIVER):
        assert devices.count("cuda") == HERE
    assert devices.count("cuda") == 3


def test_a_worker_counts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert devices.count("cuda") == HERE


def test_this_process_counts_where_the_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getpid()

    def fail() -> int:
        if os.getpid() != own:
            raise RuntimeError("no driver")
        return HERE

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    assert devices.count("cuda") == HERE


def test_this_process_counts_where_the_copy_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    own, before = os.getpid(), psutil.Process().children()

    def hang() -> int:
        while os.getpid() != own:
            time.sleep(0.1)
        return HERE

    monkeypatch.setattr(cuda_count, "_SECONDS", 0.2)
    monkeypatch.setattr(torch.cuda, "device_count", hang)
    assert devices.count("cuda") == HERE and psutil.Process().children() == before


def test_without_a_driver_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_count, "DRIVER", "/dev/there is none")
    assert devices.count("cuda") == HERE and cuda_count._count_in_copy.cache_info().misses == 0
