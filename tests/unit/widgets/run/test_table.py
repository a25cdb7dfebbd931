"""The table of ranks: a row for each, or for those of many that are alike."""

from __future__ import annotations

import html
import re
from dataclasses import replace

from notebook_accel.widgets.run import page, table
from notebook_accel.widgets.run.picture import Picture, RankState, Usage, limit_shown


def read_rows(text: str) -> list[list[str]]:
    """Return the texts of a table's cells."""
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    return [
        [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<t[hd].*?</t[hd]>", row)]
        for row in rows
    ]


def make_ranks(count: int) -> list[RankState]:
    mebibyte = 2**20
    return [
        RankState(
            rank=rank,
            status="running",
            step=100 + rank % 3,
            usage=Usage(memory=(300 + rank) * mebibyte, cpu=50.0),
        )
        for rank in range(count)
    ]


def make_picture(ranks: list[RankState]) -> Picture:
    return Picture(name="train", status="running", seconds=1.0, started=0.0, ranks=tuple(ranks))


def test_few_ranks_have_a_row_each() -> None:
    rows = read_rows(table.render_table(make_picture(make_ranks(table.MOST_ROWS))))
    assert rows[0] == ["rank", "status", "step", "memory", "CPU"]
    assert rows[2] == ["1", "● running", "101", "301 MiB", "50 %"]
    assert len(rows) == table.MOST_ROWS + 1


def test_ranks_on_several_machines_are_grouped_by_them() -> None:
    ranks = [replace(state, node=f"gpu{state.rank // 16}", usage=None) for state in make_ranks(32)]
    ranks[20] = replace(ranks[20], status="failed", note="ValueError: no")
    assert read_rows(table.render_table(make_picture(ranks))) == [
        ["ranks", "node", "status", "step", "what happened"],
        ["20", "gpu1", "✗ failed", "102", "ValueError: no"],
        ["0-15", "gpu0", "● running", "100 to 102", ""],
        ["16-19, 21-31", "gpu1", "● running", "100 to 102", ""],
    ]
    assert read_rows(table.render_table(make_picture(ranks[:2])))[1] == ["0", "gpu0", "● running", "100"]
    many = [replace(state, node=f"gpu{state.rank}", usage=None) for state in make_ranks(64)]
    many[20] = replace(many[20], status="failed", note="ValueError: no")
    assert read_rows(table.render_table(make_picture(many)))[1:] == [
        ["20", "gpu20", "✗ failed", "102", "ValueError: no"],
        ["0-19, 21-63", "63 nodes", "● running", "100 to 102", ""],
    ]


def test_of_many_ranks_those_in_the_same_state_have_one_row_and_failures_come_first() -> None:
    ranks = make_ranks(64)
    ranks[5] = RankState(rank=5, status="failed", note="ValueError: no")
    for rank in (7, 8, 9, 40):
        ranks[rank] = RankState(rank=rank, status="waiting", waiting="all_reduce", waited=float(rank))
    ranks[63] = RankState(rank=63, status="failed", note="lost rank 5, which had failed")
    picture = make_picture(ranks)
    rows = read_rows(table.render_table(picture))
    assert rows == [
        ["ranks", "status", "step", "memory", "CPU", "what happened"],
        ["5", "✗ failed", "", "", "", "ValueError: no"],
        ["63", "✗ failed", "", "", "", "lost rank 5, which had failed"],
        ["0-4, 6, 10-39, 41-62", "● running", "100 to 102", "300 MiB to 362 MiB", "50 %", ""],
        ["7-9, 40", "◐ waiting in all_reduce for 40 s", "", "", "", ""],
    ]
    assert len(read_rows(table.render_table(picture, every_rank=True))) == 65
    static = page.render_page(picture)
    assert ">all ranks</summary>" in static and static.count("<table") == 2


def test_words_of_a_waiting_rank() -> None:
    state = RankState(rank=0, status="waiting", waiting="all_gather", waited=12.7)
    assert table.describe_rank_status(state) == "◐ waiting in all_gather for 12 s"


def test_very_many_ranks_have_no_row_each() -> None:
    states = tuple(RankState(rank=rank, status="running", node=f"n{rank // 8}") for rank in range(8192))
    picture = Picture(
        name="train", status="running", seconds=1.0, started=0.0, ranks=states, hidden_outputs=8176
    )
    assert "ranks 0-8191: running" in page.render_text(picture)
    shown = page.render_page(picture)
    assert len(shown) < 10_000 and "lines of 8,176 more ranks" in shown


def test_whose_lines_are_shown_of_very_many_ranks() -> None:
    assert limit_shown(range(32), ()) == range(32)
    assert [*limit_shown(range(1000), {1, 700})] == [*range(15), 700]
    assert [*limit_shown(range(1000), set(range(500, 1000)))] == [*range(8), *range(500, 508)]
