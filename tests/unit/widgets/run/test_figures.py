"""What travels to the browser for figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

comm = pytest.importorskip("comm", reason="the oldest ipywidgets bring a way of their own")

from comm.base_comm import BaseComm  # noqa: E402

from notebook_accel.events import Display  # noqa: E402
from notebook_accel.widgets.run.figures import Figures  # noqa: E402
from notebook_accel.widgets.run.panel import Panel  # noqa: E402
from notebook_accel.widgets.run.picture import Picture  # noqa: E402

SIZE = 100_000


class Wire:
    """Stands for the way to the browser, and counts what is sent."""

    def __init__(self) -> None:
        self.sent = 0
        self.is_open: dict[str, bool] = {}

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    counted = Wire()

    class Counting(BaseComm):
        def publish_msg(self, msg_type: str, data: Any = None, *args: Any, **kwargs: Any) -> None:
            counted.sent += len(json.dumps(data, default=str))
            counted.is_open[self.comm_id] = msg_type != "comm_close"

    monkeypatch.setattr(comm, "create_comm", Counting)
    yield counted


def draw(number: int) -> Display:
    return Display(rank=0, time=float(number), data={"image/png": f"{number:05}" + "x" * SIZE})


def show(panel: Panel, displays: list[Display]) -> None:
    panel.show(
        Picture(
            name="f", status="running", seconds=1.0, started=0.0, background=True, displays=tuple(displays)
        )
    )


def list_shown(panel: Panel) -> list[int]:
    return [int(each.value.partition("base64,")[2][:5]) for each in panel._figures.box.children]


def test_a_figure_travels_once(wire: Wire) -> None:
    panel, displays = Panel(lambda: None), list[Display]()
    for number in range(32):
        displays.append(draw(number))
        show(panel, displays)
        show(panel, displays)
    assert 32 * SIZE < wire.take() < 33 * SIZE + 200_000
    for number in range(32, 40):  # the oldest makes room
        displays = [*displays[1:], draw(number)]
        show(panel, displays)
    assert 8 * SIZE < wire.take() < 9 * SIZE
    assert list_shown(panel) == list(range(8, 40))
    displays[5] = replace(draw(77), update=True)
    show(panel, displays)
    assert SIZE < wire.take() < 1.1 * SIZE
    assert list_shown(panel) == [*range(8, 13), 77, *range(14, 40)]
    show(panel, [])
    assert wire.take() < SIZE and list_shown(panel) == []
    panel.end("the end")
    assert sum(wire.is_open.values()) < 10, "the box, and what shows the page"


def test_figures_of_several_ranks_say_whose_they_are() -> None:
    figures = Figures()
    figures.show([draw(1)], names_ranks=False)
    assert "rank 0" not in figures.box.children[0].value
    figures.show([replace(draw(2), rank=3)], names_ranks=True)
    assert "rank 3" in figures.box.children[0].value
    figures.close()
