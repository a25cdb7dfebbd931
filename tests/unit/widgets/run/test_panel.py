"""What the widgets of a live view cost: each is messages to the browser."""

from __future__ import annotations

from typing import Any

import pytest

comm = pytest.importorskip("comm", reason="the oldest ipywidgets bring a way of their own")

from comm.base_comm import BaseComm  # noqa: E402

from notebook_accel.events import Line  # noqa: E402
from notebook_accel.widgets.run.panel import Panel  # noqa: E402
from notebook_accel.widgets.run.picture import (  # noqa: E402
    Bar,
    FailureSummary,
    Output,
    Picture,
    RankState,
)


@pytest.fixture
def open_comms(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The ids of what is open: widgets, layouts and styles."""
    found: set[str] = set()

    class Counting(BaseComm):
        def publish_msg(self, msg_type: str, *args: Any, **kwargs: Any) -> None:
            (found.discard if msg_type == "comm_close" else found.add)(self.comm_id)

    monkeypatch.setattr(comm, "create_comm", Counting)
    return found


def make_picture(**parts: Any) -> Picture:
    ranks = tuple(RankState(rank=rank, status="running") for rank in range(2))
    return Picture(name="train", status="running", seconds=1.0, started=0.0, ranks=ranks, **parts)


def test_a_part_is_made_when_it_has_something_to_show(open_comms: set[str]) -> None:
    panel = Panel(lambda: None)
    panel.show(make_picture())
    at_first = len(open_comms)
    assert at_first <= 16, "the first launch waits for them"
    panel.show(make_picture())
    assert len(open_comms) == at_first
    line = Line(rank=0, time=0.0, stream="stdout", text="said")
    full = make_picture(
        notice="a notice",
        bars={rank: (Bar(label="epoch", text="1/2", fraction=0.5),) for rank in range(2)},
        outputs={rank: Output(total=1, lines=(line,)) for rank in range(2)},
        failure=FailureSummary(title="rank 1 failed"),
    )
    panel.show(full)
    shown = [type(part).__name__ for part in panel.box.children]
    assert shown == ["HTML", "HBox", "HTML", "HTML", "HTML", "Checkbox", "Tab", "HTML"]
    panel.show(make_picture())
    assert len(panel.box.children) < len(shown), "what has nothing to show any more is hidden"
    panel.end("the end")
    assert len(open_comms) <= 5, "the box, and what shows the page"


def test_a_choice_holds_from_the_next_picture_on(open_comms: set[str]) -> None:
    panel = Panel(lambda: None)
    bars = {rank: (Bar(label=f"bar {rank}", text="1/2", fraction=0.5),) for rank in range(2)}
    panel.show(make_picture(bars=bars, slowest=0))
    (choice,) = (part for part in panel.box.children if getattr(part, "description", "") == "all ranks")
    assert not any("bar 1" in getattr(part, "value", "") for part in panel.box.children if part is not choice)
    choice.value = True
    panel.show(make_picture(bars=bars, slowest=0))
    texts = [part.value for part in panel.box.children if hasattr(part, "value") and part is not choice]
    assert any("bar 1" in text for text in texts)


def test_halves_of_characters_are_escaped(open_comms: set[str]) -> None:
    """Else none of the view could be sent."""
    panel = Panel(lambda: None)
    panel.show(make_picture(notice="a name with \ud800"))
    texts = [part.value for part in panel.box.children if hasattr(part, "value")]
    assert any("\\ud800" in text for text in texts) and "".join(texts).encode()
