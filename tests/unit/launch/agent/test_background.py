"""When a kernel is taken to have nothing to do, and what it imports then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

from notebook_accel.launch.agent import background
from notebook_accel.launch.checks import compiler_preload, fork_obstacles


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is imported ahead: by name, nothing in fact."""
    assert torch.nn  # a cell has imported it
    done: list[str] = []
    monkeypatch.setenv(background.VARIABLE, "false")
    for name in ("_IDLE_SECONDS", "_LONG_IDLE_SECONDS"):
        monkeypatch.setattr(background, name, 0.0)
    monkeypatch.setattr(background, "import_for_launch", lambda: done.append("launch"))
    monkeypatch.setattr(compiler_preload, "is_loaded", lambda: "compiler" in done)
    monkeypatch.setattr(compiler_preload, "load", lambda: done.append("compiler"))
    monkeypatch.setattr(fork_obstacles, "reasons", list)
    return done


def make_watcher(**names: object) -> background._CellWatcher:
    """Return what is called at the end of each cell of a notebook that has some names."""
    return background._CellWatcher(SimpleNamespace(user_ns=names))


def make_training() -> FunctionType:
    def train(loss: Any) -> None:
        loss.backward()

    train.__module__ = "cells"
    return train


async def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def let_others_run() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def run(cells: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(cells, 60))


def run_training_cell() -> None:
    """Run a cell that defines a function that trains, and some time without one."""

    async def run_cell() -> None:
        make_watcher(train=make_training())()
        await let_others_run()

    run(run_cell())


def test_a_cell_begins_the_wait_anew(imported: list[str]) -> None:
    async def run_cells() -> None:
        ahead = make_watcher()
        ahead()
        ahead.wait()  # a cell that awaits has begun
        await let_others_run()
        assert not imported
        ahead()
        ahead()  # another cell has run meanwhile
        await let_others_run()

    run(run_cells())
    assert imported == ["launch"]


def test_the_compiler_is_for_who_trains(imported: list[str]) -> None:
    async def run_cells() -> None:
        ahead = make_watcher()
        for _ in range(2):
            ahead()
            await let_others_run()
        assert imported == ["launch"]
        ahead._shell.user_ns["train"] = make_training()
        ahead()
        await wait_for(lambda: "compiler" in imported)
        ahead()
        await let_others_run()

    run(run_cells())
    assert imported == ["launch", "compiler"]


def test_the_compiler_is_for_forks_of_the_notebook(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have it from their agent."""
    obstacles = ["CUDA was used"]
    monkeypatch.setattr(fork_obstacles, "reasons", lambda: obstacles)

    async def run_cells() -> None:
        ahead = make_watcher(train=make_training())
        ahead()
        await let_others_run()
        assert imported == ["launch"]
        obstacles.clear()
        ahead()
        await let_others_run()

    run(run_cells())
    assert imported == ["launch", "compiler"]


def test_workers_of_other_systems_are_no_forks(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    run_training_cell()
    assert imported == ["launch"]


def test_nothing_is_told_that_the_launch_will_tell(
    imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        imported.append("tried")
        raise ImportError("it is broken")

    monkeypatch.setattr(background, "import_for_launch", fail)
    run_training_cell()
    assert imported == ["tried"]


def test_without_a_loop_nothing_happens(imported: list[str]) -> None:
    make_watcher()()
    assert not imported


def test_a_fork_of_the_kernel_watches_nothing(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = make_watcher()
    monkeypatch.setattr("os.getpid", lambda: 1)

    async def run_cell() -> None:
        ahead()
        await let_others_run()

    run(run_cell())
    assert not imported


def test_a_small_machine_starts_no_agent_ahead(imported: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []
    monkeypatch.setenv(background.VARIABLE, "true")
    agent = SimpleNamespace(import_ahead=lambda order: None)
    monkeypatch.setattr("notebook_accel.launch.agent.client.find", lambda: agent if started else None)
    monkeypatch.setattr(
        "notebook_accel.launch.agent.client.start", lambda background: started.append(background) or agent
    )
    for free, expected in ((1 << 30, []), (4 << 30, [True])):
        monkeypatch.setattr("notebook_accel.launch.memory_kills.find_free_memory", lambda free=free: free)
        run_training_cell()
        assert started == expected
