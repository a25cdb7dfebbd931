"""The lines of ranks in a live view: behind tabs, or behind a list to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from notebook_accel.events import Line
from notebook_accel.widgets.run import page
from notebook_accel.widgets.run.panes import Chooser, Tabs, choose_panes
from notebook_accel.widgets.run.picture import Output, Picture, RankState


def make_picture(ranks: int, bad: Mapping[int, Any] | None = None, cause: int | None = None) -> Picture:
    """Return a run each of whose ranks has said its number."""
    bad = bad or {}
    states = (RankState(rank=rank, status=bad.get(rank, "running")) for rank in range(ranks))
    outputs = {
        rank: Output(total=1, lines=(Line(rank=rank, time=0.0, stream="stdout", text=f"I am {rank}"),))
        for rank in range(ranks)
    }
    return Picture(
        name="train",
        status="failed" if bad else "running",
        seconds=1.0,
        started=0.0,
        ranks=tuple(states),
        outputs=outputs,
        cause=cause,
    )


def test_few_ranks_have_tabs_and_many_have_a_list() -> None:
    tabs = choose_panes(make_picture(16), None)
    assert isinstance(tabs, Tabs)
    assert choose_panes(make_picture(2), tabs) is tabs
    assert isinstance(choose_panes(make_picture(17), tabs), Chooser), "nodes may join"
    assert choose_panes(Picture(name="f", status="running", seconds=0.0, started=0.0), None) is None


def test_a_tab_says_that_its_rank_has_failed() -> None:
    tabs = Tabs()
    tabs.show(make_picture(3))
    tabs.show(make_picture(3, {1: "killed"}))
    titles = [tabs.box.get_title(number) for number in range(3)]
    assert titles == ["rank 0", "rank 1 ✗", "rank 2"]


def test_a_failed_rank_is_first_in_the_list_and_shown_until_the_user_chooses() -> None:
    chooser = Chooser()
    ranks, pane = chooser.box.children
    chooser.show(make_picture(64))
    assert [rank for _, rank in ranks.options] == list(range(64)) and "I am 0" in pane.value
    failed = make_picture(64, {5: "failed", 37: "failed", 9: "killed"}, cause=37)
    chooser.show(failed)
    assert [words for words, _ in ranks.options[:4]] == [
        "rank 37 ✗ failed",
        "rank 5 ✗ failed",
        "rank 9 ✗ killed",
        "rank 0",
    ]
    assert ranks.value == 37 and "I am 37" in pane.value
    ranks.value = 20
    assert "I am 20" in pane.value, "at once"
    chooser.show(make_picture(64, {5: "failed"}, cause=5))
    assert ranks.value == 20 and "I am 20" in pane.value and ranks.options[0][1] == 5


def test_the_saved_page_begins_with_the_lines_of_failed_ranks() -> None:
    shown = page.render_page(make_picture(64, {5: "failed", 37: "failed"}, cause=37))
    titles = [part.partition("</summary>")[0] for part in shown.split("Output of ")[1:]]
    assert titles[:3] == ["rank 37 ✗ failed: 1 line", "rank 5 ✗ failed: 1 line", "rank 0: 1 line"]
    boxes = [part for part in shown.split("<details")[1:] if "Output of" in part]
    opened = [part for part in boxes if part.startswith(" open")]
    assert len(opened) == 2 and "I am 37" in opened[0] and "I am 0<" in opened[1].replace("\n", "<")
