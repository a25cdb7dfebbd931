"""The processes of workers on this machine: what joins them with this one, how they end, and what is said of that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from notebook_accel import notebook_launcher, runtime
from notebook_accel.errors import WorkerExitedError
from notebook_accel.launch.agent import client
from notebook_accel.launch.supervise import local_group
from notebook_accel.launch.supervise.local_group import _Fork, _Joint


def shadow(folder: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a module that fails where this process's workers look first."""
    (folder / f"{module}.py").write_text("name_of_nothing")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_a_worker_that_dies_in_its_imports_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow(tmp_path, "torch", monkeypatch)
    cpu = {"ACCELERATE_USE_CPU": "true"}
    client.end()  # the next one has that path
    try:
        with pytest.raises(
            WorkerExitedError, match="left with exit code 1 before its function began"
        ) as caught:
            notebook_launcher(
                os.getpid, num_processes=2, start_method="fresh", environment=cpu, output="none", view="none"
            )
    finally:
        client.end()
        runtime.runs().clear()
    assert str(caught.value).endswith("NameError: name 'name_of_nothing' is not defined")
    assert f'"{tmp_path / "torch.py"}"' in str(caught.value)


@contextmanager
def forked(target: Callable[..., object] = signal.pause, *args: Any) -> Iterator[Any]:
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    try:
        yield process
    finally:
        with suppress(ValueError):  # it is closed
            process.kill()
            process.join()


def wait_for(process: Any) -> None:
    """Wait until a process has ended; its code is there for others."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture(params=[True, False], ids=["pidfd", "an old system"])
def _descriptors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.delattr(os, "pidfd_open", raising=False)


@pytest.mark.usefixtures("_descriptors")
def test_the_exit_code_of_a_fork() -> None:
    with forked(os._exit, 3) as process:
        fork = _Fork(process)
        wait_for(process)
        assert fork.look() and fork.exitcode == 3
        fork.close()


@pytest.mark.usefixtures("_descriptors")
def test_a_fork_for_which_other_code_has_waited() -> None:
    with forked() as process:
        fork = _Fork(process)
        assert not fork.look()
        process.kill()
        os.waitpid(process.pid, 0)
        assert fork.look() and fork.exitcode is None
        fork.close()


@pytest.mark.usefixtures("_descriptors")
def test_a_fork_that_ends_as_one_looks_has_its_code() -> None:
    with forked() as process:

        class Ending:
            """Ends once its code was looked for."""

            pid, sentinel, close = process.pid, process.sentinel, process.close

            @property
            def exitcode(self) -> int | None:
                if (code := process.exitcode) is None:
                    process.kill()
                    wait_for(process)
                return code  # type: ignore[no-any-return]

        fork = _Fork(Ending())
        assert not fork.look()
        assert fork.look() and fork.exitcode == -signal.SIGKILL
        fork.close()


def list_open() -> set[int]:
    names = os.listdir("/dev/fd")  # that of the list itself is closed by now
    return {int(name) for name in names if os.path.exists(f"/dev/fd/{name}")}


def test_a_worker_keeps_its_own_ends_and_other_processes_none() -> None:
    before = list_open()
    first, second = _Joint(), _Joint()
    everything = list_open() - before
    assert {*first.filenos(), *second.filenos()} == everything and len(everything) == 16
    found: list[int] = []
    with first.forking():
        own = everything - {*first.filenos(), *second.filenos()}
        other = threading.Thread(target=lambda: found.extend(first.filenos()))
        other.start()
        other.join()
    theirs = first.theirs
    ends = {theirs.events.fileno(), theirs.stdout.fileno(), theirs.stderr.fileno(), theirs.lifeline}
    assert own == ends and set(found) == everything - set(second.filenos()), "another thread forks no worker"
    first.close_theirs()
    second.close()
    assert list_open() - before == set(first.filenos()) == everything - ends - (everything - set(found))
    first.close()
    assert list_open() == before and not {first, second} & set(runtime.owners())


def test_nothing_stays_open_of_what_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    before, made = list_open(), iter([local_group.Pipe, local_group.Pipe])

    def make(duplex: bool) -> object:
        pipe = next(made, None)
        if pipe is None:
            raise OSError(24, "Too many open files")
        return pipe(duplex)

    monkeypatch.setattr(local_group, "Pipe", make)
    with pytest.raises(OSError, match="Too many"):
        _Joint()
    assert list_open() == before
