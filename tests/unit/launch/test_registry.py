"""Runs of one process share its devices."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import notebook_accel
from notebook_accel import devices, notebook_launcher, runtime, tpu
from notebook_accel.errors import LaunchError
from notebook_accel.events import Result
from notebook_accel.launch import registry
from notebook_accel.launch.engines.base import Outcome
from notebook_accel.launch.engines.detached.folder import describe_here, make
from notebook_accel.launch.engines.inprocess import InProcessEngine
from notebook_accel.launch.engines.local import LocalEngine
from notebook_accel.launch.job import Job
from notebook_accel.launch.run import Run
from notebook_accel.launch.supervise.control import Control
from notebook_accel.launch.supervise.delivery import Deliver
from notebook_accel.session import service
from notebook_accel.stream.record import RunRecord
from notebook_accel.stream.sinks import Sink
from notebook_accel.widgets.run.picture import make_picture
from tests.unit.jobs import make_job


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = dataclasses.replace(devices.CUDA, label="GPU", plural="GPUs", counter=lambda: 4)
    monkeypatch.setattr(devices, "best", lambda use_cpu=None, *_: devices.CPU if use_cpu else gpu)
    monkeypatch.setattr(devices, "count", lambda kind: 4)
    yield
    runtime.runs().clear()


def job(num_processes: int, **environment: str) -> Job:
    kind = devices.best(environment.get("ACCELERATE_USE_CPU") == "true")
    return make_job(os.getpid, num_processes, background=True, environment=environment, device_kind=kind)


def hold(job: Job, is_over: bool = False) -> Any:
    run = SimpleNamespace(job=job, is_over=is_over, number=0, forget_variables=lambda: None)
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


def test_a_run_keeps_its_number_and_eight_that_have_ended_stay() -> None:
    try:
        for _ in range(12):
            registry.open_run(job(1), Returning(), []).execute()
        assert [run.number for run in registry.runs()] == list(range(4, 13)), "eight, and the newest"
        assert notebook_accel.runs().find(9) is registry.runs()[5]
        with pytest.raises(ValueError, match="run 3 is not in the list"):
            notebook_accel.runs().find(3)
        assert Run(job(1), Returning()).number == 0, "it is not listed"
    finally:
        runtime.runs().clear()


class Large:
    """An argument that takes much memory."""


def fail(large: Large) -> None:
    batch = Large()
    SEEN.append(weakref.ref(batch))
    assert locals()  # which leaves a copy in the frame
    raise ValueError("no memory")


SEEN: list[weakref.ref[Large]] = []


def test_an_ended_run_keeps_neither_function_nor_arguments() -> None:
    class Function(Large):
        def __call__(self, large: Large) -> int:
            return 5

    try:
        function, large = Function(), Large()
        kept = [weakref.ref(function), weakref.ref(large)]
        notebook_launcher(function, (large,), num_processes=1)
        behind = Run(dataclasses.replace(job(2), function=function, args=(large,)), Returning())
        behind.execute()
        del function, large
        gc.collect()
        assert [each() for each in kept] == [None, None]
        (run,) = registry.runs()
        assert "Function on 1 process: done" in repr(run) and behind.result() == 5
        assert behind.record.results and behind.status == "done" and behind.lines() == []
        assert make_picture(behind).status == "done"
        with pytest.raises(LaunchError, match="has not kept its function: call notebook_launcher again"):
            run.job.function()
    finally:
        runtime.runs().clear()


def test_a_failed_run_keeps_variables_until_the_next_one() -> None:
    """A debugger shows them; the next run needs the memory."""
    SEEN.clear()
    try:
        large = Large()
        kept = weakref.ref(large)
        with pytest.raises(ValueError, match="no memory"):
            notebook_launcher(fail, (large,), num_processes=1)
        del large
        gc.collect()
        assert kept() is not None and SEEN[0]() is not None
        notebook_launcher(os.getpid, num_processes=1)
        gc.collect()
        assert kept() is None and SEEN[0]() is None
        failed, _ = registry.runs()
        with pytest.raises(ValueError, match="no memory") as caught:
            failed.result()
        assert caught.traceback[-1].name == "fail", "the lines stay"
    finally:
        runtime.runs().clear()


def test_a_coroutine_that_a_failure_went_through_goes_on() -> None:
    async def launch_and_go_on() -> str:
        variable = "kept"
        with pytest.raises(ValueError, match="no memory"):
            notebook_launcher(fail, (Large(),), num_processes=1)
        await asyncio.sleep(0)
        return variable

    async def launch_beside() -> str:
        first = asyncio.ensure_future(launch_and_go_on())
        await asyncio.sleep(0)
        notebook_launcher(os.getpid, num_processes=1)
        return await first

    try:
        assert asyncio.run(launch_beside()) == "kept"
    finally:
        runtime.runs().clear()


def test_a_background_run_that_cannot_be_shown_has_ended() -> None:
    """Else it would keep its devices for ever, and this process would wait for it at its end."""

    class Files(Sink):
        closed = False

        def show(self, events: object) -> None: ...

        def note(self, text: str) -> None: ...

        def close(self) -> None:
            self.closed = True

    def fail(run: Run) -> Sink:
        raise OSError("no folder")

    files = Files()
    try:
        run = registry.open_run(job(1), Returning(), [lambda run: files, fail])
        with pytest.raises(OSError, match="no folder"):
            run.start()
        assert run.is_over and run.status == "failed" and files.closed
    finally:
        runtime.runs().clear()


class Returning(InProcessEngine):
    """As if a worker had returned."""

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        deliver([Result(rank=0, time=0.0, value=b"pickled")])
        return Outcome(values={0: 5})


def test_the_second_run_takes_what_the_first_left(four_gpus: None) -> None:
    first = registry.reserve_devices(job(2))
    assert first.holds == ("0", "1") and "CUDA_VISIBLE_DEVICES" not in first.environment
    run = hold(first)
    second = registry.reserve_devices(job(2))
    assert second.holds == ("2", "3") and second.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    hold(second)
    with pytest.raises(
        LaunchError, match=r"needs 1 GPU, and none of 0, 1, 2, 3 are free \(0 by namespace.*wait for"
    ):
        registry.reserve_devices(job(1))
    run.is_over = True
    assert registry.reserve_devices(job(2)).holds == ("0", "1")


def test_devices_chosen_by_hand_are_not_exchanged(four_gpus: None) -> None:
    hold(registry.reserve_devices(job(1, CUDA_VISIBLE_DEVICES="2")))
    assert (
        registry.reserve_devices(job(2, CUDA_VISIBLE_DEVICES="0,3")).environment["CUDA_VISIBLE_DEVICES"]
        == "0,3"
    )
    with pytest.raises(LaunchError, match="needs 2 GPUs, and 1 of 2, 3 is free"):
        registry.reserve_devices(job(2, CUDA_VISIBLE_DEVICES="2,3"))


@pytest.mark.parametrize("kind", [devices.XPU, *devices.EXTENSIONS], ids=lambda kind: kind.name)
def test_other_makers_devices_have_their_own_variable(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch, kind: devices.DeviceKind
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # says nothing of them
    monkeypatch.setenv(str(kind.visible), "1,2,3")
    first = registry.reserve_devices(make_job(os.getpid, 1, background=True, device_kind=kind))
    assert first.holds == ("1",) and not first.environment
    hold(first)
    second = registry.reserve_devices(make_job(os.getpid, 2, background=True, device_kind=kind))
    assert second.environment == {kind.visible: "2,3"}


def test_devices_that_no_variable_hides_are_not_shared(four_gpus: None) -> None:
    kind = dataclasses.replace(devices.CUDA, name="other", visible=None)
    hold(registry.reserve_devices(make_job(os.getpid, 1, background=True, device_kind=kind)))
    with pytest.raises(LaunchError, match=r"none of 0 are free"):
        registry.reserve_devices(make_job(os.getpid, 1, background=True, device_kind=kind))


def test_a_run_in_this_process_needs_its_own_first_device(four_gpus: None) -> None:
    hold(registry.reserve_devices(job(1)))
    here = make_job(os.getpid, device_kind=devices.best())
    with pytest.raises(LaunchError, match="needs 1 GPU"):
        registry.reserve_devices(here)


def test_cpus_are_shared(four_gpus: None) -> None:
    for _ in range(3):
        ready = registry.reserve_devices(job(8, ACCELERATE_USE_CPU="true"))
        assert ready.holds == ()
        hold(ready)


def test_each_chip_is_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "is_here", lambda environment=None: True)
    monkeypatch.setattr(tpu, "chips", lambda environment=None: 4)
    monkeypatch.delenv("TPU_VISIBLE_CHIPS", raising=False)
    job = make_job(os.getpid, device_kind=devices.XLA, background=True)
    first = registry.reserve_devices(job)
    assert first.holds == ("0",) and "TPU_VISIBLE_CHIPS" not in first.environment
    run = hold(first)
    try:
        second = registry.reserve_devices(job)
        assert second.holds == ("1",) and second.environment["TPU_VISIBLE_CHIPS"] == "1"
        for all_chips in ({"local_world_size": 4}, {"tpu_mode": "spmd"}):
            with pytest.raises(LaunchError, match="needs 4 XLA devices, and 3 of 0, 1, 2, 3 are free"):
                registry.reserve_devices(dataclasses.replace(job, **all_chips))
        run.is_over = True
        assert registry.reserve_devices(dataclasses.replace(job, tpu_mode="spmd")).holds == (
            "0",
            "1",
            "2",
            "3",
        )
    finally:
        runtime.runs().clear()


def test_runs_and_sessions_see_each_others_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Held:
        is_over = False
        job = dataclasses.replace(make_job(), holds=("0",))

        def __repr__(self) -> str:
            return "<the session that holds 0>"

    kind = next(row for row in devices.KINDS if row.name == "cuda")
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    monkeypatch.setattr(runtime, "_sessions", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    held = Held()
    registry.add_session(held)
    taken = registry.reserve_devices(make_job(device_kind=kind, distributed=True, serve=service.serve))
    assert taken.holds == ("1",) and taken.environment["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(LaunchError, match=r"0 by <the session that holds 0>.*close a session"):
        registry.reserve_devices(make_job(local_world_size=2, device_kind=kind))
    held.is_over = True
    assert registry.reserve_devices(make_job(local_world_size=2, device_kind=kind)).holds == ("0", "1")
    atexit.unregister(registry._close_sessions)


def test_what_runs_that_outlive_their_notebooks_hold_is_not_given_away(
    four_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_STATE", str(tmp_path))
    folder = make()
    wanted = registry.reserve_devices(job(2))
    folder.fill(wanted, {}, describe_here())
    lock = folder.hold()
    try:
        assert registry.reserve_devices(job(2)).holds == ("2", "3")
        with pytest.raises(
            LaunchError, match=r"0 by run 1 \(getpid\), see notebook_accel.attach\(1\); 1 by run 1"
        ):
            registry.reserve_devices(job(3))
        watched = dataclasses.replace(job(4), attached=folder)
        assert registry.open_run(watched, LocalEngine(), []).job.holds == (), "it takes none"
    finally:
        lock.close()
    assert registry.reserve_devices(job(4)).holds == ("0", "1", "2", "3")
