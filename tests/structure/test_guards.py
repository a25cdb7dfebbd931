"""Each guard of tests/guards.py catches its leak, names it, cleans it up and leaves clean tests alone."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests import guards
from tests.guards import LISTED_BY_THREAD, list_descendants
from tests.structure.source import ROOT
from tests.unit.clock import wait_until

LEAKS = """
import multiprocessing, os, signal, subprocess, sys, tempfile, threading
from multiprocessing import shared_memory
import pytest, torch

KEEP = []

def test_environment(): os.environ["LEAKED"] = "1"

def test_environment_removed(): del os.environ["THERE_BEFORE"]

def test_process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

def test_runtime():
    from notebook_accel import Accelerator
    Accelerator(cpu=True)

def test_threads():
    thread = threading.Thread(target=threading.Event().wait, name="forgotten", daemon=True)
    thread.start()

def test_children(): KEEP.append(subprocess.Popen(["sleep", "60"]))

def test_children_of_the_fork_server():
    process = multiprocessing.get_context("forkserver").Process(target=_sleep)
    process.start()
    KEEP.append(process)

def test_children_of_the_agent():
    from notebook_accel.launch.agent import client
    from tests.unit.launch.agent.ordering import make_order, start_worker
    worker = start_worker(client.start(), make_order("ends.events.send(b'up'), time.sleep(600)"))
    KEEP.append(worker)
    assert worker.__enter__()[1].recv(2) == b"up"

def test_shared_memory():
    from _posixshmem import shm_open
    fd = shm_open(f"/psm_leaked_{os.getpid()}", os.O_CREAT | os.O_RDWR, mode=0o600)
    os.ftruncate(fd, 10)
    os.close(fd)

def test_descriptors(): KEEP.append([os.pipe() for _ in range(3)])

def test_temp_files(): tempfile.mkdtemp(prefix="torchelastic_")

def test_signals(): signal.signal(signal.SIGTERM, lambda *_: None)

def test_cwd(): os.chdir("/")

def test_dtype(): torch.set_default_dtype(torch.float64)

def test_num_threads(): torch.set_num_threads(torch.get_num_threads() + 1)

@pytest.mark.may_leak("environment", reason="to show that it may")
def test_allowed(): os.environ["ALLOWED"] = "1"

@pytest.mark.may_leak("nothing known", reason="a typing error")
def test_unknown_kind(): pass

def test_clean():
    assert "LEAKED" not in os.environ and os.environ["THERE_BEFORE"] == "1"
    assert not torch.distributed.is_initialized()
    assert torch.get_default_dtype() == torch.float32

def test_a_warm_fork_server_is_no_leak():
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    process.close()

def test_an_agent_is_no_leak():
    from notebook_accel.launch.agent import client
    client.start()

def _sleep():
    import time
    time.sleep(60)
"""
CONFTEST = """
from tests import guards
from tests.conftest import _guard, _own_temp_folder

guards.GRACE_S = 0.5  # these leaks never go away by themselves
"""
EXPECTED = {
    "test_environment": "environment variable LEAKED='1' was set",
    "test_environment_removed": "environment variable THERE_BEFORE was removed",
    "test_process_group": "destroy_process_group() is missing",
    "test_runtime": "runtime.reset() is missing",
    "test_threads": "thread 'forgotten' is still running",
    "test_children": "runs 'sleep 60'",
    "test_children_of_the_fork_server": "multiprocessing.forkserver import main",
    "test_children_of_the_agent": "-c import sys; sys.path[:] = ",
    "test_shared_memory": "shared memory /dev/shm/psm_leaked",
    "test_descriptors": "6 file descriptors are still open",
    "test_temp_files": "torchelastic_",
    "test_signals": "handler of SIGTERM",
    "test_cwd": "became /",
    "test_dtype": "default dtype: torch.float32 became torch.float64",
    "test_num_threads": "number of threads",
    "test_unknown_kind": "may_leak(nothing known): the kinds are runtime",
}
CLEAN = ("test_allowed", "test_clean", "test_a_warm_fork_server_is_no_leak", "test_an_agent_is_no_leak")


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the leaking tests once, in a session of their own, and return each one's error text."""
    folder = tmp_path_factory.mktemp("guards")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_leaks.py").write_text(LEAKS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = may_leak: as in the project\n")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "THERE_BEFORE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert report.exists(), done.stdout + done.stderr
    return _read(report)


def _read(report: Path) -> dict[str, str]:
    cases: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        texts = [problem.text or "" for problem in case if problem.tag in ("error", "failure")]
        cases[case.attrib["name"]] = cases.get(case.attrib["name"], "") + "\n".join(texts)
    return cases


@pytest.mark.parametrize("name", EXPECTED)
def test_a_leak_is_reported(errors: dict[str, str], name: str) -> None:
    assert EXPECTED[name] in errors[name]


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_test_passes(errors: dict[str, str], name: str) -> None:
    assert errors[name] == ""


def test_one_leak_is_one_sentence(errors: dict[str, str]) -> None:
    assert errors["test_environment"].count("  - ") == 1
    assert errors["test_process_group"].count("  - ") == 1


@pytest.mark.skipif(not LISTED_BY_THREAD.exists(), reason="this system does not list children by thread")
def test_children_are_those_that_psutil_finds() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(input())'])"
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        # each starts one of its own
        wait_until(lambda: all(list_descendants(process.pid) for process in processes))
        found = sorted(list_descendants(os.getpid()))
        assert found == sorted(child.pid for child in psutil.Process().children(recursive=True))
        assert {process.pid for process in processes} < set(found)
    finally:
        for process in processes:
            assert process.communicate(b"ended\n")[0] == b"ended\n"


def test_children_that_one_reading_leaves_out_are_found() -> None:
    with mock.patch.object(guards, "_list_children", side_effect=[[5, 6], [6], [], [7], [], [], [], []]):
        assert list_descendants(4) == {5, 6, 7}


@pytest.mark.skipif(not LISTED_BY_THREAD.exists(), reason="this system does not list children by thread")
def test_a_process_that_ends_while_it_is_read_has_no_children() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert list_descendants(process.pid) == set()
