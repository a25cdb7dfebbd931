"""Tests for runs that go on without this process: left, and taken up again to be stopped."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from notebook_accel import LaunchError
from notebook_accel.errors import RunLeftError
from notebook_accel.events import Lines
from notebook_accel.launch.engines.base import Engine, Outcome
from notebook_accel.launch.job import Job
from notebook_accel.launch.run import Run
from notebook_accel.launch.supervise.control import Control
from notebook_accel.stream.record import RunRecord
from tests.unit.clock import wait_until
from tests.unit.jobs import make_job


class Elsewhere(Engine):
    """Watches a run that goes on elsewhere, until it is left, is stopped or has ended."""

    name = "elsewhere"

    def __init__(self) -> None:
        self.watchers = 0
        self.stops: list[float] = []
        self.has_ended = threading.Event()

    def run(self, job: Job, record: RunRecord, deliver: Any, control: Control) -> Outcome:
        self.watchers += 1
        deliver([Lines(rank=0, time=time.time(), stream="stdout", texts=("said",))])
        while not self.has_ended.is_set():
            if control.is_left:
                return Outcome(error=RunLeftError("it goes on"))
            if control.stop_is_asked:
                self.stops.append(control.grace)
                return Outcome(values={0: "saved"}, was_asked=True)
            time.sleep(0.002)
        return Outcome(values={0: "done"}, was_asked=False)

    def outlives(self, job: Job) -> bool:
        return True

    def find_left(self, job: Job) -> Job:
        time.sleep(0.05)  # a shared disk is slow
        return job


@pytest.fixture
def engine() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
def left(engine: Elsewhere) -> Run:
    run = Run(make_job(name="train", distributed=True, background=True), engine)
    run.start()
    run.break_off()
    assert run.status == "left" and run.is_over
    with pytest.raises(RunLeftError, match="it goes on"):
        run.result()
    return run


def stop_in_threads(run: Run, count: int) -> list[Any]:
    seen: list[Any] = []

    def stop() -> None:
        run.stop(5.0)
        seen.append((run.status, run.result()))

    threads = [threading.Thread(target=stop) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return seen


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_stop_takes_a_left_run_up_once(left: Run, engine: Elsewhere, count: int) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert stop_in_threads(left, count) == [("stopped", "saved")] * count
    finally:
        sys.setswitchinterval(before)
    assert engine.watchers == 2 and engine.stops == [5.0] and left.lines() == ["said"]


def test_a_left_run_that_has_ended_by_itself_is_not_called_stopped(left: Run, engine: Elsewhere) -> None:
    engine.has_ended.set()
    left.stop()
    assert (left.status, left.result(), engine.stops) == ("done", "done", [])


def test_a_stop_waits_until_the_view_is_closed(engine: Elsewhere) -> None:
    closing, may_close = threading.Event(), threading.Event()

    class Slow:
        def show(self, events: Any) -> None:
            """Show nothing."""

        def close(self) -> None:
            closing.set()
            may_close.wait(30)

        def note(self, text: str) -> None:
            """Show nothing."""

    run = Run(make_job(name="train", distributed=True, background=True), engine, [lambda _: Slow()])
    run.start()
    run.request_break_off()
    assert closing.wait(30)
    stopping = threading.Thread(target=run.stop)
    stopping.start()
    time.sleep(0.1)
    assert engine.watchers == 1
    may_close.set()
    stopping.join(30)
    assert (run.status, run.result()) == ("stopped", "saved")


def test_a_left_run_stays_left_where_it_cannot_be_taken_up(
    left: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LaunchError, match="can't start new thread"):
            left.stop()
    assert left.status == "left" and left.is_over
    left.stop()
    wait_until(lambda: left.is_over)
    assert left.status == "stopped"


def test_a_function_that_raises_what_leaving_does_has_failed(engine: Elsewhere) -> None:
    def run(job: Job, record: RunRecord, deliver: Callable[..., None], control: Control) -> Outcome:
        return Outcome(error=RunLeftError("another run"))

    engine.run = run  # type: ignore[method-assign]
    failed = Run(make_job(name="train", distributed=True), engine)
    failed.execute()
    assert failed.status == "failed"
    failed.stop()
