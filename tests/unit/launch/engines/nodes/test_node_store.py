"""A store whose process is gone: what its calls raise, and that nothing is printed."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import DistError, DistNetworkError, TCPStore

from notebook_accel.launch.engines.nodes import node_store, stores
from notebook_accel.launch.engines.nodes.node_store import NodeStore
from tests.stopping import stop
from tests.unit.clock import PATIENCE_S

HOST = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="torch shows its log level on Linux alone")


@pytest.fixture
def host() -> Iterator[subprocess.Popen[str]]:
    """A process with a store, whose port it prints."""
    command = [sys.executable, "-c", HOST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def connect(host: subprocess.Popen[str]) -> TCPStore:
    assert host.stdout is not None
    return stores.connect_store("127.0.0.1", int(host.stdout.readline()), lambda: None)


@only_linux
def test_the_loss_of_a_store_is_a_line_and_nothing_is_printed(
    host: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also of calls that wait for an answer meanwhile, on two threads."""
    store = NodeStore(connect(host))
    store.set("key", "value")
    assert store.get("key") == b"value" and store.check(["key"])
    capfd.readouterr()
    with ThreadPoolExecutor(2) as pool:
        stop(host.pid)
        asking = [pool.submit(store.check, ["key"]) for _ in range(2)]
        host.kill()
        errors = [each.exception(PATIENCE_S) for each in asking]
    with pytest.raises(DistNetworkError) as caught:
        store.check(["key"])
    errors.append(caught.value)
    for error in errors:
        assert isinstance(error, DistNetworkError) and str(error) and "\n" not in str(error), errors
    said = capfd.readouterr()
    assert said.err == "" == said.out
    level = node_store._find_level()
    assert level is not None and level.value == 1, "others are told as before"


def test_a_key_that_does_not_come_is_no_loss(host: subprocess.Popen[str]) -> None:
    store = NodeStore(connect(host))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(DistError) as caught:
        store.get("missing")
    assert "\n" not in str(caught.value) and not isinstance(caught.value, DistNetworkError)
    store.set("missing", "here")
    assert store.get("missing") == b"here" and store.port == store.inner.port


@pytest.mark.parametrize("chosen", [0, 2])
def test_what_the_user_chose_stays(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    level = ctypes.c_int(chosen)
    monkeypatch.setattr(node_store, "_find_level", lambda: level)
    with node_store.keep_quiet():
        assert level.value == chosen


def test_a_torch_that_does_not_show_what_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "__file__", node_store.__file__)
    assert node_store._find_level.__wrapped__() is None
