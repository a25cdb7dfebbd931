"""What the widgets of a live view cost: each is messages to the browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

comm = pytest.importorskip("comm", reason="the oldest ipywidgets bring a way of their own")

from comm.base_comm import BaseComm  # noqa: E402

from notebook_accel.events import Line  # noqa: E402
from notebook_accel.stream.series import Point  # noqa: E402
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


def measured(laid: Sequence[int], count: int = 20) -> Picture:
    """A picture of ranks that have logged; some of them are laid over each other."""
    points = {rank: {"loss": [Point(step, 1.0, step + rank) for step in range(3)]} for rank in range(count)}
    chosen = {rank: points[rank] for rank in laid}
    return make_picture(
        metrics={"loss": tuple(points[0]["loss"])}, measured=tuple(range(count)), rank_metrics=chosen
    )


def find_all(panel: Panel, kind: str) -> list[Any]:
    boxes = [part for part in panel.box.children if type(part).__name__ in ("HBox", "VBox")]
    return [
        part
        for part in (*panel.box.children, *(child for box in boxes for child in box.children))
        if type(part).__name__ == kind
    ]


def test_ranks_are_laid_over_each_other_where_the_user_asks_for_it(open_comms: set[str]) -> None:
    panel = Panel(lambda: None)
    panel.show(measured((), count=1))
    assert "a line for each rank" not in [box.description for box in find_all(panel, "Checkbox")]
    panel.show(measured((), count=2))
    (each,) = (box for box in find_all(panel, "Checkbox") if box.description == "a line for each rank")
    assert panel.laid is None
    each.value = True
    assert panel.laid == ()
    panel.show(measured((0, 1), count=2))
    assert any("━</span> 1</span>" in text.value for text in find_all(panel, "HTML"))
    assert not find_all(panel, "SelectMultiple"), "all that there are have a line"
    each.value = False
    panel.show(measured((), count=2))
    assert panel.laid is None and not any("━</span> 1<" in text.value for text in find_all(panel, "HTML"))


def test_of_many_ranks_some_are_chosen_from_a_list(open_comms: set[str]) -> None:
    panel = Panel(lambda: None)
    panel.show(measured(()))
    (each,) = (box for box in find_all(panel, "Checkbox") if box.description == "a line for each rank")
    each.value = True
    panel.show(measured(()))  # made before the user's click
    panel.show(measured(range(8)))
    (chooser,) = find_all(panel, "SelectMultiple")
    assert chooser.value == tuple(range(8)), "the list shows what is drawn"
    chooser.value = (3, 19)
    assert panel.laid == (3, 19)
    panel.show(measured((3, 19), count=24))
    assert chooser.value == panel.laid == (3, 19) and chooser.options[-1] == 23
    assert any("━</span> 19</span>" in text.value for text in find_all(panel, "HTML")), "at once"
    panel.end("the end")
    assert len(open_comms) <= 5


def test_halves_of_characters_are_escaped(open_comms: set[str]) -> None:
    """Else none of the view could be sent."""
    panel = Panel(lambda: None)
    panel.show(make_picture(notice="a name with \ud800"))
    texts = [part.value for part in panel.box.children if hasattr(part, "value")]
    assert any("\\ud800" in text for text in texts) and "".join(texts).encode()
