"""Tests for `notebook-accel test`, the trial of a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from notebook_accel import devices
from notebook_accel.cli import test as selftest
from notebook_accel.diagnosis.check import Check
from tests.unit.command import run


def test_the_self_test_passes_here(tmp_path: Path) -> None:
    done = run(tmp_path, "test", "--num_processes", "3", ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok    ") == 5 and done.stdout.endswith(
        "\nall passed: launches work on this machine\n"
    )
    for text in (
        "process start: 3 by ",
        "collective: 2 CPU processes by gloo",
        "97 rows",
        "1 and 3 processes",
    ):
        assert text in done.stdout


def test_the_self_test_takes_a_config(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3\n")
    done = run(tmp_path, "test", "--config_file", str(tmp_path / "own.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process start: 3 by " in done.stdout
    (tmp_path / "own.yaml").write_text("num_processes: many\n")
    wrong = run(tmp_path, "test", "--config_file", str(tmp_path / "own.yaml"))
    assert (wrong.returncode, "many" in wrong.stderr, "Traceback" in wrong.stderr) == (2, True, False)


def test_the_self_test_says_what_failed(tmp_path: Path) -> None:
    done = run(tmp_path, "test", ACCELERATE_USE_CPU="true", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 1
    assert sum(line.startswith("failed ") for line in done.stdout.splitlines()) == 4
    assert "this process is rank 0 of a run of 2" in done.stdout
    told, _, found = done.stdout.partition("4 of 5 failed; `notebook-accel doctor` finds this:\n")
    assert found.startswith("problem  launch: notebook_launcher: this process is rank 0"), told
    wrong = run(tmp_path, "test", ACCELERATE_TORCH_DEVICE="toaster", ACCELERATE_USE_CPU="false")
    assert (wrong.returncode, "Traceback" in wrong.stderr) == (1, False)
    assert "toaster" in wrong.stderr


def test_what_doctor_knows_nothing_of_is_said_by_the_trial(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(machine: selftest.Machine) -> str:
        raise RuntimeError("no route")

    monkeypatch.setattr(selftest, "_TRIALS", (("collective", fail),))
    monkeypatch.setattr(
        selftest, "run_checks", lambda: [Check(name="this process", status="warning", text="")]
    )
    assert selftest.run_trials() == 1
    assert capsys.readouterr().out.splitlines() == [
        "failed    0.0 s  collective: RuntimeError: no route",
        "1 of 1 failed; `notebook-accel doctor` finds nothing else",
    ]


def test_trials_notice_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = selftest.Machine(num_processes=2, kind=devices.CPU, environment={})

    def answers(*values: Any) -> None:
        monkeypatch.setattr(selftest.Machine, "run", lambda self, *args, **kwargs: list(values))

    answers(0, 0)
    with pytest.raises(AssertionError, match=r"ranks are \[0, 0\], expected \[0, 1\]"):
        selftest._try_start(machine)
    answers(3.0, 2.0)
    with pytest.raises(AssertionError, match="sums"):
        selftest._try_collective(machine)
    answers(list(range(50)), list(range(49, 97)))
    with pytest.raises(AssertionError, match="rows of all ranks together"):
        selftest._try_sharding(machine)
    answers([1.0], [2.0])
    with pytest.raises(AssertionError, match="weights of rank 1"):
        selftest._try_training(machine)
