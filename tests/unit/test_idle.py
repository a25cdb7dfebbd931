"""When the kernel is taken to have nothing to do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable
from types import FunctionType
from typing import Any

import pytest

from notebook_accel import idle
from notebook_accel.launch.checks import compiler_preload, fork_obstacles


class Shell:
    """Stands in for IPython's: it is its own list of events."""

    def __init__(self) -> None:
        self.events = self
        self.left: list[Any] = []
        self.user_ns: dict[str, Any] = {}

    def unregister(self, name: str, callback: Callable[..., object]) -> None:
        self.left.append(callback)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is imported ahead: by name, nothing in fact."""
    done: list[str] = []
    for name in ("_IDLE_SECONDS", "_LONG_IDLE_SECONDS", "_PAUSE_SECONDS"):
        monkeypatch.setattr(idle, name, 0.0)
    monkeypatch.setattr(idle, "import_for_launch", lambda: done.append("launch"))
    monkeypatch.setattr(compiler_preload, "load", done.append)
    monkeypatch.setattr(compiler_preload, "list_missing_parts", lambda: ["one", "two"])
    monkeypatch.setattr(fork_obstacles, "reasons", list)
    monkeypatch.setattr(sys, "platform", "linux")
    return done


async def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def let_others_run() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def run(cells: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(cells, 60))


def make_training() -> FunctionType:
    def train(loss: Any) -> None:
        loss.backward()

    train.__module__ = "cells"
    return train


def run_training_cell() -> None:
    """Run a cell that defines a function that trains, and wait until nothing is left to import."""

    async def run_cell() -> None:
        shell = Shell()
        shell.user_ns["train"] = make_training()
        idle._ImportAhead(shell)()
        await wait_for(lambda: shell.left)

    run(run_cell())


def test_a_cell_begins_the_wait_anew(imported: list[str]) -> None:
    async def run_cells() -> None:
        shell = Shell()
        ahead = idle._ImportAhead(shell)
        ahead()
        first = ahead._timer
        ahead.wait()  # a cell that awaits has begun
        assert first is not None and first.cancelled()
        ahead()
        second = ahead._timer
        ahead()  # another cell has run meanwhile
        assert second is not None and second.cancelled() and not imported
        await wait_for(lambda: imported)

    run(run_cells())
    assert imported == ["launch"]


def test_the_compiler_is_for_who_trains(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    look = compiler_preload.TrainingWatch.look

    def count_and_look(self: compiler_preload.TrainingWatch, values: Iterable[Any]) -> bool:
        looks.append(self)
        return look(self, values)

    monkeypatch.setattr(compiler_preload.TrainingWatch, "look", count_and_look)

    async def run_cells() -> None:
        shell = Shell()
        ahead = idle._ImportAhead(shell)
        ahead()
        await wait_for(lambda: looks)
        await let_others_run()
        assert len(looks) == 1, "again after the next cell"
        assert imported == ["launch"] and not shell.left
        shell.user_ns["train"] = make_training()
        ahead()
        await wait_for(lambda: "one" in imported)
        ahead.wait()  # a cell comes between the parts
        await let_others_run()
        assert imported == ["launch", "one"]
        ahead()
        await wait_for(lambda: shell.left)
        assert shell.left == [ahead, ahead.wait]

    run(run_cells())
    assert imported == ["launch", "one", "two"]


def test_workers_that_are_no_forks_have_it_from_elsewhere(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_obstacles, "reasons", lambda: ["CUDA was used"])

    run_training_cell()
    assert imported == ["launch"]


def test_workers_of_other_systems_are_no_forks(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")

    run_training_cell()
    assert imported == ["launch"]


def test_it_waits_until_nothing_forbids_forks(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_obstacles, "may_pass", lambda: True)
    obstacles = ["a process group was made"]
    looks: list[None] = []

    def look() -> list[str]:
        looks.append(None)
        return obstacles

    monkeypatch.setattr(fork_obstacles, "reasons", look)

    async def run_cells() -> None:
        shell = Shell()
        shell.user_ns["train"] = make_training()
        ahead = idle._ImportAhead(shell)
        ahead()
        await wait_for(lambda: looks)
        await let_others_run()
        assert len(looks) == 1, "again after the next cell"
        assert imported == ["launch"] and not shell.left
        obstacles.clear()  # the next cell destroys the group
        ahead()
        await wait_for(lambda: shell.left)

    run(run_cells())
    assert imported == ["launch", "one", "two"]


def test_nothing_is_told_that_the_launch_will_tell(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str = "") -> None:
        imported.append("tried")
        raise ImportError("it is broken")

    monkeypatch.setattr(idle, "import_for_launch", fail)
    monkeypatch.setattr(compiler_preload, "load", fail)

    run_training_cell()
    assert imported == ["tried", "tried"]


def test_without_a_loop_nothing_happens() -> None:
    ahead = idle._ImportAhead(Shell())
    ahead()
    assert ahead._timer is None
