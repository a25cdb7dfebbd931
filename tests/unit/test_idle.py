"""When the kernel is taken to have nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from notebook_accel import idle


class Shell:
    """Stands in for IPython's: it is its own list of events."""

    def __init__(self) -> None:
        self.events = self
        self.left: list[Any] = []

    def unregister(self, name: str, callback: Callable[..., object]) -> None:
        self.left.append(callback)


def test_a_cell_begins_the_wait_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(idle, "_IDLE_SECONDS", 0.0)
    monkeypatch.setattr(idle, "import_for_launch", lambda: imported.append("all"))

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
        while not imported:
            await asyncio.sleep(0)
        assert shell.left == [ahead, ahead.wait]

    asyncio.run(asyncio.wait_for(run_cells(), 60))
    assert imported == ["all"]


def test_nothing_is_told_that_the_launch_will_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ImportError("ipywidgets is broken")

    monkeypatch.setattr(idle, "import_for_launch", fail)
    idle._ImportAhead(Shell())._import()


def test_without_a_loop_nothing_happens() -> None:
    ahead = idle._ImportAhead(Shell())
    ahead()
    assert ahead._timer is None
