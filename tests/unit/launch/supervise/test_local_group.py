"""What is said of workers that fail before their function, or before any code of ours, runs."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from notebook_accel import notebook_launcher, runtime
from notebook_accel.errors import LaunchError, WorkerExitedError
from notebook_accel.launch.supervise import fork_server, local_group
from notebook_accel.launch.supervise.control import Control, StopAsked
from notebook_accel.launch.worker import early
from tests.unit.jobs import make_job

pytestmark = pytest.mark.skipif(os.name == "nt", reason="output comes as events there")


def shadow(folder: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module that fails where this process's workers look first."""
    (folder / f"{module}.py").write_text("name_of_nothing")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_a_worker_that_dies_in_its_imports_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow(tmp_path, "torch", monkeypatch)
    cpu = {"ACCELERATE_USE_CPU": "true"}
    try:
        with pytest.raises(
            WorkerExitedError, match="left with exit code 1 before its function began"
        ) as caught:
            notebook_launcher(
                os.getpid, num_processes=2, start_method="spawn", environment=cpu, output="none", view="none"
            )
    finally:
        runtime.runs().clear()
    assert str(caught.value).endswith("NameError: name 'name_of_nothing' is not defined")
    assert f'"{tmp_path / "torch.py"}"' in str(caught.value)


class Broken:
    """What no process can make again."""

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return exec, ("name_of_nothing",)


def test_a_worker_of_the_fork_server_is_heard_before_it_imports_what_it_needs() -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=early.run, args=(theirs, early.Sealed(print, Broken())))
    worker.start()
    theirs.close()
    with open(ours.fileno(), closefd=False) as errors:
        assert errors.read().endswith("NameError: name 'name_of_nothing' is not defined\n")
    ours.close()
    worker.join()
    assert worker.exitcode == 1
    worker.close()


def test_a_fork_server_that_ended_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow(tmp_path, "shadowed", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", ["os", "shadowed"])
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", None)
    said = pytest.raises(LaunchError, match=r"(?s)fork server.* has ended; its imports fail.*name_of_nothing")
    job = dataclasses.replace(make_job(os.getpid), start_method="forkserver")
    with said, fork_server.explain_end(job, Control().check):
        raise EOFError
    forked = dataclasses.replace(job, start_method="fork")
    with pytest.raises(EOFError), fork_server.explain_end(forked, Control().check):
        raise EOFError


def test_a_stop_does_not_wait_until_it_is_known_why_the_fork_server_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it imports may take a minute."""
    began = tmp_path / "began"
    (tmp_path / "slow.py").write_text(f"open({str(began)!r}, 'x')\nimport time; time.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(forkserver._forkserver, "_preload_modules", ["slow"])
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", None)
    control = Control()
    job = dataclasses.replace(make_job(os.getpid), start_method="forkserver")

    def check() -> None:
        if began.exists():
            control.stop(0.5)
        control.check()

    before = psutil.Process().children()
    with pytest.raises(StopAsked), fork_server.explain_end(job, check):
        raise EOFError
    assert set(psutil.Process().children()) <= set(before)


def test_a_worker_that_is_killed_as_it_is_forked_is_not_taken_for_its_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forkserver._forkserver, "_forkserver_pid", os.getpid())
    job = dataclasses.replace(make_job(os.getpid), start_method="forkserver")
    said = pytest.raises(LaunchError, match="a worker ended before it began: something has killed it")
    with said, fork_server.explain_end(job, Control().check):
        raise BrokenPipeError


def test_this_process_keeps_its_own_errors(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = multiprocessing.Pipe(duplex=False)
    with local_group._hear_errors(writing):
        os.write(2, b"the worker's\n")
    os.write(2, b"ours\n")
    writing.close()
    with open(reading.fileno(), closefd=False) as errors:
        assert errors.read() == "the worker's\n"
    reading.close()
    assert capfd.readouterr().err == "ours\n"
