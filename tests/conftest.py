"""Fixtures of every test: a temp folder of the session's own, and guards against what a test leaves behind."""

from __future__ import annotations

import gc
import multiprocessing.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests import forker, guards

# OpenMP reads it when torch is imported. Threads without work would else spin, on processors that other tests need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Accelerate and Transformers, beside which tests run this package, would compute with torch_xla wherever it is there.
os.environ.setdefault("USE_TORCH_XLA", "0")


@pytest.fixture(scope="session", autouse=True)
def _interrupts_count() -> None:
    """Let interrupts reach this process and those it starts: a shell's background jobs ignore them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_temp_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the session and its child processes a temp folder that no other program writes to."""
    # pytest's folders stay where people look for them, multiprocessing's where it removes it at exit
    tmp_path_factory.getbasetemp()
    multiprocessing.util.get_temp_dir()
    before = os.environ.get("TMPDIR")
    folder = tempfile.mkdtemp(prefix="na-test-")  # short: sockets below it have about 100 characters
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _forker(_own_temp_folder: None) -> Iterator[None]:
    """Let tests start programs as copies of a process that has imported torch, with the session's temp folder."""
    with forker.session():
        yield


@pytest.fixture(scope="module", autouse=True)
def _small_collections() -> None:
    """Leave what was imported by now out of garbage collections, of which many a test causes several."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaks, with a sentence for each leak; see `tests/guards.py`."""
    allowed = {mark.args[0] for mark in request.node.iter_markers("may_leak")}
    if unknown := allowed - set(guards.KINDS):
        raise ValueError(f"may_leak({', '.join(sorted(unknown))}): the kinds are {', '.join(guards.KINDS)}")
    before = guards.take_snapshots()
    yield
    if leaks := guards.find_leaks(before, allowed):
        pytest.fail("this test leaks:\n" + "\n".join(f"  - {leak}" for leak in leaks), pytrace=False)


@pytest.fixture
def clean_runtime() -> Iterator[None]:
    """Start without a runtime, and take down the one that the test built along with its process group."""
    from notebook_accel import runtime

    runtime.reset()
    yield
    runtime.reset()
    guards.ProcessGroup().restore(False)
