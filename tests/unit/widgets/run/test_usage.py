"""What the ranks of a run use: memory, processors, and cards where a driver answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from notebook_accel.widgets.run import page
from notebook_accel.widgets.run.picture import Picture, Usage
from notebook_accel.widgets.run.usage import History, Meter
from tests.unit.clock import Clock, wait_until


class FakeDriver(ModuleType):
    """NVML of a machine with one card on which process 1 holds memory."""

    class NVMLError(Exception):
        """As the package names it."""

    def __init__(self, *, driver: bool = True) -> None:
        super().__init__("pynvml")
        self.driver, self.is_open = driver, False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise type("NVMLError_LibraryNotFound", (self.NVMLError,), {})
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:  # noqa: N802
        if number:
            raise self.NVMLError("no such card")
        return "card"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return "card"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:  # noqa: N802
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 << 30),
            SimpleNamespace(pid=1, usedGpuMemory=None),
        ]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=7 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=61)


def test_memory_and_load_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    meter = Meter()
    pids = {0: os.getpid(), 1: gone.pid}
    clock = Clock()
    monkeypatch.setattr("notebook_accel.widgets.run.usage.time", clock)
    began = time.monotonic()
    first = meter.read(pids)
    assert list(first) == [0] and first[0].cpu is None
    assert (first[0].memory or 0) == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert meter.read(pids) is first, "not twice within the interval"
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    clock.now += 1.0
    assert (meter.read(pids)[0].cpu or 0) > 100 * 0.2 / (time.monotonic() - began)
    meter.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process that has ended cannot be asked")
def test_a_worker_that_has_ended_keeps_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_accel.widgets.run.usage._INTERVAL", 0.0)
    worker = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    meter = Meter()
    used = meter.read({0: worker.pid})[0].memory
    assert used
    assert worker.stdin is not None
    worker.stdin.close()
    wait_until(
        lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE
    )  # nobody waited for it yet
    assert meter.read({0: worker.pid})[0].memory
    worker.wait()
    meter.close()


def test_cards_are_asked_where_a_driver_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    meter = Meter()
    used = meter.read({0: os.getpid(), 1: os.getppid(), 2: os.getpid()}, ["GPU-1234", "0", "7"])
    assert [(used[rank].device_memory, used[rank].device) for rank in range(3)] == [
        (5 << 30, 61.0),
        (7 << 30, 61.0),
        (None, None),
    ]
    assert driver.is_open
    meter.close()
    assert not driver.is_open


@pytest.mark.parametrize("module", [None, FakeDriver(driver=False)], ids=["no package", "no driver"])
def test_without_a_driver_there_is_nothing_of_cards(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    meter = Meter()
    used = meter.read({0: os.getpid()}, ["0"])
    assert used[0].device_memory is None and used[0].memory
    meter.close()


def test_what_was_measured_is_drawn_over_time() -> None:
    history = History()
    for second in range(5):
        history.add({0: Usage(memory=second << 20, cpu=50.0), 1: Usage(memory=7 << 20)}, 100.0 + second)
    found = history.read()
    assert [point.value for point in found["rank 0"]["memory (MiB)"]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(found["rank 1"]) == ["memory (MiB)"], "a load that is not known has no line"
    picture = Picture(name="train", status="running", seconds=5.0, started=100.0, history=found)
    svg = page.render_usage(picture)
    assert ">memory (MiB)</tspan>" in svg and ">CPU (%)</tspan>" in svg and ">seconds</text>" in svg
    assert ">memory and load</summary>" in page.render_page(picture)
    nothing = Picture(name="train", status="running", seconds=5.0, started=100.0)
    assert page.render_usage(nothing) == "" and "memory and load" not in page.render_page(nothing)


def test_of_many_ranks_the_most_the_mean_and_the_least_are_kept() -> None:
    history = History()
    history.add({rank: Usage(cpu=float(rank)) for rank in range(11)}, 0.0)
    assert {name: points["CPU (%)"][0].value for name, points in history.read().items()} == {
        "most": 10.0,
        "mean": 5.0,
        "least": 0.0,
    }


def test_ranks_that_come_one_after_the_other_leave_no_lines_of_the_first() -> None:
    history = History()
    for count in (3, 6, 20):
        history.add({rank: Usage(cpu=1.0) for rank in range(count)}, float(count))
    history.add({0: Usage(cpu=1.0)}, 30.0)
    assert set(history.read()) == {"most", "mean", "least"}


def test_a_long_run_keeps_a_bounded_number_of_values() -> None:
    history = History()
    for second in range(5000):
        history.add({0: Usage(memory=second << 20)}, float(second))
    points = history.read()["rank 0"]["memory (MiB)"]
    assert len(points) < 700 and points[-1].value == 4999.0
