"""Runs of one process share its devices."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from notebook_accel import devices, notebook_launcher, runtime, tpu
from notebook_accel.errors import LaunchError
from notebook_accel.events import Result
from notebook_accel.launch import registry
from notebook_accel.launch.control import Control
from notebook_accel.launch.engines.base import Deliver, Outcome
from notebook_accel.launch.engines.inprocess import InProcessEngine
from notebook_accel.launch.engines.xla import XlaEngine
from notebook_accel.launch.job import Job
from notebook_accel.launch.run import Run
from notebook_accel.stream.record import RunRecord


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = dataclasses.replace(
        devices.CPU, name="cuda", label="GPU", plural="GPUs", backend="nccl", counter=lambda: 4
    )
    monkeypatch.setattr(devices, "best", lambda use_cpu=None: devices.CPU if use_cpu else gpu)
    monkeypatch.setattr(devices, "count", lambda kind: 4)
    yield
    runtime.runs().clear()


def job(num_processes: int, **environment: str) -> Job:
    return Job(function=os.getpid, num_processes=num_processes, background=True, environment=environment)


def hold(settled: Job, is_over: bool = False) -> Any:
    run = SimpleNamespace(job=settled, is_over=is_over)
    runtime.runs().append(run)
    return run


def test_a_value_belongs_to_the_cell_that_launched_it() -> None:
    """Ended runs are kept, with their output; their values may be large."""
    try:
        value = notebook_launcher(set, num_processes=1)
        assert value == set()
        value = weakref.ref(value)
        assert value() is None
        run = registry.runs()[-1]
        with pytest.raises(LaunchError, match="gave its value to the cell that launched it"):
            run.result()
        assert run.status == "done"

        run = Run(job(1), Returning())
        run.execute()
        assert run.result() == run.result() == 5
        assert run.record.results[0].value == b"", "what is pickled takes as much again"
    finally:
        runtime.runs().clear()


class Returning(InProcessEngine):
    """As if a worker had returned."""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        deliver([Result(rank=0, time=0.0, value=b"pickled")])
        return Outcome(values={0: 5})


def test_the_second_run_takes_what_the_first_left(four_gpus: None) -> None:
    first = registry.settled(job(2))
    assert first.holds == ("0", "1") and "CUDA_VISIBLE_DEVICES" not in first.environment
    run = hold(first)
    second = registry.settled(job(2))
    assert second.holds == ("2", "3") and second.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    hold(second)
    with pytest.raises(
        LaunchError, match=r"needs 1 GPU, and none of 0, 1, 2, 3 are free \(0 by namespace.*wait for"
    ):
        registry.settled(job(1))
    run.is_over = True
    assert registry.settled(job(2)).holds == ("0", "1")


def test_devices_chosen_by_hand_are_not_exchanged(four_gpus: None) -> None:
    hold(registry.settled(job(1, CUDA_VISIBLE_DEVICES="2")))
    assert registry.settled(job(2, CUDA_VISIBLE_DEVICES="0,3")).environment["CUDA_VISIBLE_DEVICES"] == "0,3"
    with pytest.raises(LaunchError, match="needs 2 GPUs, and 1 of 2, 3 is free"):
        registry.settled(job(2, CUDA_VISIBLE_DEVICES="2,3"))


def test_a_run_in_this_process_needs_its_own_first_device(four_gpus: None) -> None:
    hold(registry.settled(job(1)))
    here = Job(function=os.getpid, num_processes=1)
    with pytest.raises(LaunchError, match="needs 1 GPU"):
        registry.settled(here)


def test_cpus_are_shared(four_gpus: None) -> None:
    for _ in range(3):
        settled = registry.settled(job(8, ACCELERATE_USE_CPU="true"))
        assert settled.holds == ()
        hold(settled)


def test_each_chip_is_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "is_here", lambda environment: True)
    monkeypatch.setattr(tpu, "chips", lambda environment: 4)
    monkeypatch.delenv("TPU_VISIBLE_CHIPS", raising=False)
    job = Job(function=os.getpid, num_processes=1, engine=XlaEngine(), background=True)
    first = registry.settled(job)
    assert first.holds == ("0",) and "TPU_VISIBLE_CHIPS" not in first.environment
    run = hold(first)
    try:
        second = registry.settled(job)
        assert second.holds == ("1",) and second.environment["TPU_VISIBLE_CHIPS"] == "1"
        for all_chips in ({"num_processes": 4}, {"tpu_mode": "spmd"}):
            with pytest.raises(LaunchError, match="needs 4 XLA devices, and 3 of 0, 1, 2, 3 are free"):
                registry.settled(dataclasses.replace(job, **all_chips))
        run.is_over = True
        assert registry.settled(dataclasses.replace(job, tpu_mode="spmd")).holds == ("0", "1", "2", "3")
    finally:
        runtime.runs().clear()
