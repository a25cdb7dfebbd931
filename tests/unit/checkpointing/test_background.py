"""Tests for saves in the background whose run ends before they do: by an exception, a kill, a stop, an interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accel import Accelerator, Session, notebook_launcher, runtime
from notebook_accel.checkpointing import manifest
from notebook_accel.launch.run import Run
from notebook_accel.launch.supervise import worker_group
from notebook_accel.session import workers
from tests.unit.clock import wait_in, wait_until

OPTIONS: dict[str, Any] = {"num_processes": 2, "view": "none", "output": "none", "block": False}
DROPPED = "was still being saved in the background when its ranks ended, and is dropped"


class Slow:
    """A value of a checkpoint that is written once there is a file.

    Args:
        go: the file.
    """

    def __init__(self, go: Path) -> None:
        self._go = go

    def __deepcopy__(self, memo: Any) -> Slow:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        while not self._go.exists():
            time.sleep(0.005)
        return int, ()


class Interrupt:
    """A value whose writing is interrupted."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Registered:
    """What an accelerator saves besides models.

    Args:
        value: part of its state.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"value": 0}


def begin_to_save(where: Path, go: Path) -> Accelerator:
    """Begin to write the checkpoint `kept`, which is whole once there is a file."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.register_for_checkpointing(Registered(Slow(go)))
    accelerator.save_state(where / "kept", async_save=True)
    return accelerator


def save_and_raise(where: Path, go: Path) -> None:
    accelerator = begin_to_save(where, go)
    if accelerator.process_index == 0:
        raise ValueError("a bug in the next line")
    threading.Event().wait()


def save_and_die(where: Path, go: Path) -> None:
    accelerator = begin_to_save(where, go)
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def save(where: Path, go: Path) -> None:
    begin_to_save(where, go)


def save_and_wait(where: Path, go: Path) -> None:
    begin_to_save(where, go)
    threading.Event().wait()


def save_and_fail_once(where: Path, go: Path) -> list[str]:
    if not (where / "kept").exists():
        save_and_raise(where, go)
    return sorted(os.listdir(where))


@contextlib.contextmanager
def launched(function: Any, *arguments: Path, **options: Any) -> Iterator[Run]:
    run = notebook_launcher(function, arguments, **OPTIONS, **options)
    assert isinstance(run, Run)
    try:
        yield run
    finally:
        run.stop(0.0)
        runtime.runs().clear()


def wait_for_notice(run: Run) -> None:
    """Wait until the launcher says something after a failure, or ends the run."""
    wait_until(lambda: (run.record.failures and run.record.notice) or run.is_over)


def test_who_raises_still_finishes_the_checkpoint(tmp_path: Path) -> None:
    where, go = tmp_path / "saved", tmp_path / "go"
    with launched(save_and_raise, where, go) as run:
        wait_for_notice(run)
        assert len(run.record.failures) == 1, "it is told at once"
        assert f"checkpoint {where / 'kept'} is still being saved" in run.record.notice
        go.touch()
        run.wait()
        with pytest.raises(ValueError, match="a bug in the next line"):
            run.result()
    assert os.listdir(where) == ["kept"]
    assert manifest.read(where / "kept")


def test_a_restart_finds_the_checkpoint_of_the_attempt_that_failed(tmp_path: Path) -> None:
    where, go = tmp_path / "saved", tmp_path / "go"
    with launched(save_and_fail_once, where, go, max_restarts=1) as run:
        wait_for_notice(run)
        go.touch()
        assert run.result() == ["kept"]


def test_a_checkpoint_that_lost_a_rank_is_dropped_and_told(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    with launched(save_and_die, where, tmp_path / "go") as run:
        run.wait()
        assert f"checkpoint {where / 'kept'} {DROPPED}" in run.record.notice
    assert os.listdir(where) == []


def test_who_raises_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "SAVE_SECONDS", 0.2)
    where = tmp_path / "saved"
    with launched(save_and_raise, where, tmp_path / "go") as run:
        run.wait()
        assert DROPPED in run.record.notice and isinstance(run.failure, ValueError)
    assert os.listdir(where) == []


def test_a_stop_waits_for_the_checkpoint(tmp_path: Path) -> None:
    where, go = tmp_path / "saved", tmp_path / "go"
    with launched(save_and_wait, where, go) as run:
        wait_until(lambda: len(run.record.saves) == 2 or run.is_over)
        run.request_stop(60.0)
        wait_until(lambda: len(run.record.held) == 2 or run.is_over)
        go.touch()
        run.wait()
        assert not run.record.notice
    assert os.listdir(where) == ["kept"]


def test_a_stop_drops_the_checkpoint_once_its_time_is_over(tmp_path: Path) -> None:
    where = tmp_path / "saved"
    with launched(save_and_wait, where, tmp_path / "go") as run:
        wait_until(lambda: len(run.record.saves) == 2 or run.is_over)
        run.stop(0.0)
        assert DROPPED in run.record.notice
    assert os.listdir(where) == []


def test_a_session_that_is_closed_finishes_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_LEAVE_SECONDS", 0.2)
    where, go = tmp_path / "saved", tmp_path / "go"
    session = Session(2)
    closing = threading.Thread(target=session.close)
    try:
        session.run(save, where, go)
    finally:
        closing.start()
    wait_in(closing, "wait_for_leaving")
    go.touch()
    closing.join()
    assert os.listdir(where) == ["kept"]


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, clean_runtime: None) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state(tmp_path / "kept")
    accelerator.register_for_checkpointing(Registered(Interrupt()))
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(tmp_path / "kept")
    assert os.listdir(tmp_path) == ["kept"]
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(tmp_path / "other")
    assert os.listdir(tmp_path) == ["kept"]
