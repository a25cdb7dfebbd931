"""CUDA devices are counted by a copy of a kernel, which leaves nothing in it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from notebook_accel import cuda_count, devices, probes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process counts itself")
HERE = 99
SHELL = object()


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A kernel on a machine with a driver, and a torch built for it that counts 3 devices in other processes."""
    control = tmp_path / "nvidiactl"
    control.touch()
    own = os.getpid()
    monkeypatch.setattr(cuda_count, "DRIVER", str(control))
    monkeypatch.setattr(probes, "find_kernel_shell", lambda: SHELL)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: HERE if os.getpid() == own else 3)
    cuda_count._count_in_copy.cache_clear()
    yield
    cuda_count._count_in_copy.cache_clear()


def num_copies() -> int:
    """Return how many copies have counted."""
    return cuda_count._count_in_copy.cache_info().misses


def test_a_copy_counts_once_and_ends() -> None:
    before = psutil.Process().children()
    assert [devices.count("cuda") for _ in range(2)] == [3, 3]
    assert psutil.Process().children() == before and num_copies() == 1


def test_visible_devices_are_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.count("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices.count("cuda")
    assert num_copies() == 2


def test_a_process_that_has_the_driver_open_counts_itself() -> None:
    with open(cuda_count.DRIVER):
        assert devices.count("cuda") == HERE
    assert devices.count("cuda") == 3


def test_a_process_that_is_no_kernel_counts_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "find_kernel_shell", lambda: None)
    assert devices.count("cuda") == HERE and num_copies() == 0


def test_without_a_driver_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_count, "DRIVER", "/dev/there is none")
    assert devices.count("cuda") == HERE and num_copies() == 0


@pytest.mark.parametrize("found", [0, "fails"])
def test_this_process_counts_where_the_copy_finds_none(
    found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getpid()

    def count() -> int:
        if os.getpid() == own:
            return HERE
        if found == 0:
            return 0
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "device_count", count)
    assert [devices.count("cuda") for _ in range(2)] == [HERE, HERE]
    assert num_copies() == 2, "it may have been too early for the driver"


def hang() -> int:
    """Count nothing in a copy."""
    while os.getppid() == TESTS:
        time.sleep(0.05)
    return HERE


TESTS = os.getpid()


def test_this_process_counts_where_the_copy_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = psutil.Process().children()
    monkeypatch.setattr(cuda_count, "_SECONDS", 0.2)
    monkeypatch.setattr(torch.cuda, "device_count", hang)
    assert devices.count("cuda") == HERE and psutil.Process().children() == before


def test_an_interrupt_leaves_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    before, main = psutil.Process().children(), threading.main_thread().ident
    assert main is not None
    monkeypatch.setattr(torch.cuda, "device_count", hang)

    def interrupt() -> None:
        while psutil.Process().children() == before:
            time.sleep(0.01)
        time.sleep(0.2)  # it comes in the moment of the fork, or while the answer is waited for
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        devices.count("cuda")
    thread.join()
    assert psutil.Process().children() == before


def test_signals_of_children_may_be_ignored() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert devices.count("cuda") == 3
    finally:
        signal.signal(signal.SIGCHLD, before)
