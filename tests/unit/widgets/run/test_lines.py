"""Which lines a saved notebook keeps, and how they look."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from notebook_accel.events import Event, Line, Lines, Unfinished
from notebook_accel.launch.engines.base import Deliver, Engine, Outcome
from notebook_accel.launch.job import Job
from notebook_accel.launch.run import Run
from notebook_accel.launch.supervise.control import Control
from notebook_accel.stream.lines import split_lines
from notebook_accel.stream.record import MAX_BYTES, MAX_TAIL, RunRecord
from notebook_accel.widgets.run import lines
from notebook_accel.widgets.run.picture import Output, Picture, make_picture
from tests.unit.jobs import make_job

TRACE = ("Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: bad")


class Told(Engine):
    """Tells lines, and ends."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        deliver(self.events)
        return Outcome()


def nothing() -> None:
    """The function of the runs here."""


def line(text: str, rank: int = 0) -> Lines:
    return Lines(rank=rank, time=time.time(), stream="stdout", texts=(text,))


def keep(*told: Lines, ranks: int = 2, most: int = lines.MAX_SAVED, **options: Any) -> Picture:
    """Return what is kept of a run whose ranks have written these lines."""
    run = Run(make_job(nothing, ranks, **options), Told(told))
    run.execute()
    return lines.keep_all(make_picture(run), run.record, most)


def texts(kept: Sequence[Line]) -> list[str]:
    return [each.text for each in kept]


def strip(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html)


def test_all_lines_are_kept_where_they_fit() -> None:
    kept = keep(*(line(f"{rank}: {number}", rank) for number in range(1000) for rank in range(2)))
    for rank, output in kept.outputs.items():
        assert texts(output.lines) == [f"{rank}: {number}" for number in range(1000)]
        assert (output.head, output.hidden, output.alike) == ((), 0, 0)


def test_what_all_ranks_have_written_alike_is_there_once() -> None:
    kept = keep(
        *(line(text, rank) for rank in range(3) for text in ("loading", f"mine {rank}", "done")), ranks=3
    )
    assert texts(kept.outputs[0].lines) == ["loading", "mine 0", "done"]
    assert strip(lines.render_lines(0, kept.outputs[0])) == "[all] loading\nmine 0\n[all] done\n"
    for rank in (1, 2):
        assert texts(kept.outputs[rank].lines) == [f"mine {rank}"] and kept.outputs[rank].alike == 2
        box = strip(lines.render_box(rank, kept.outputs[rank], is_open=False))
        assert (
            box
            == f"Output of rank {rank}: 3 lines, 2 of them by all ranks and shown with the first rankmine {rank}\n"
        )


@pytest.mark.parametrize(
    "told",
    [
        [("step", 0), ("step", 1), ("step", 1)],  # not as often
        [("step", 0), ("other", 1)],
        [("step", 0)],  # one rank has written nothing: nobody knows whether it will
        [("", 0), ("", 1)],
        [(text, rank) for rank in (0, 1) for text in TRACE],
    ],
)
def test_other_lines_stay_with_their_ranks(told: Sequence[tuple[str, int]]) -> None:
    kept = keep(*(line(text, rank) for text, rank in told))
    for rank, output in kept.outputs.items():
        assert texts(output.lines) == [text for text, whose in told if whose == rank]
        assert not output.alike


def test_a_rank_that_has_written_nothing_has_not_written_alike() -> None:
    kept = keep(*(line("loading", rank) for rank in range(2)), ranks=3)
    assert not any(output.alike or output.shared for output in kept.outputs.values())
    some = keep(*(line("loading", rank) for rank in range(3)), ranks=3, output=[0, 1])
    assert not any(output.alike or output.shared for output in some.outputs.values())


def test_what_a_page_makes_of_lines_counts() -> None:
    told = [replace(line("'<é" * 100), stream="stderr" if number % 2 else "stdout") for number in range(1000)]
    (output,) = keep(*told, ranks=1, most=100_000).outputs.values()
    html = lines.render_lines(0, output, "all")
    assert 80_000 < len(html.encode()) < 110_000


def test_a_last_line_without_room_leaves_the_first_ones() -> None:
    (output,) = keep(
        *(line("x" * 8) for _ in range(300)), line("y" * 1500), ranks=1, most=2000
    ).outputs.values()
    assert output.head and not output.lines
    assert "are left out here" in lines.render_box(0, output, is_open=True)


def test_what_one_rank_is_writing_is_not_of_all() -> None:
    output = Output(total=1, unfinished=(Unfinished(rank=0, time=0.0, stream="stdout", text="a"),))
    output = replace(output, shared=frozenset({("stdout", "a")}))
    assert "[all]" not in lines.render_lines(0, output)


def test_of_too_much_the_first_and_the_last_lines_are_kept() -> None:
    many = [line(f"{number:09}") for number in range(1000)]
    (output,) = keep(*many, ranks=1, most=200).outputs.values()
    assert texts(output.head) == [f"{number:09}" for number in range(10)]
    assert texts(output.lines) == [f"{number:09}" for number in range(990, 1000)]
    assert output.hidden == 980
    box = strip(lines.render_box(0, output, is_open=True, log_dir="/logs"))
    assert "000000009\n… 980 lines are left out here: /logs/rank_0.log has all …000000990\n" in box
    assert "earlier lines" not in box
    assert "left out here: log_dir= keeps all in files …" in strip(lines.render_box(0, output, is_open=True))
    listed = strip(lines.render_box(0, output, is_open=True, number=7))
    assert (
        "notebook_accel.runs().find(7).lines(0) has all while this kernel keeps the run; log_dir=" in listed
    )


def test_small_ranks_leave_their_room_to_others() -> None:
    told = [line("a", 0), *(line(f"{number:09}", 1) for number in range(30))]
    kept = keep(*told, most=302)
    assert len(kept.outputs[1].lines) == 30 and not kept.outputs[1].head
    less = keep(*told, most=202)
    assert texts(less.outputs[0].lines) == ["a"]
    assert (len(less.outputs[1].head), len(less.outputs[1].lines)) == (10, 10)


def test_the_first_lines_stay_where_the_record_has_forgotten_what_follows() -> None:
    """They say with what a run was started."""
    (output,) = keep(
        line("learning rate 0.1"),
        *(line("x" * 2000) for _ in range(MAX_BYTES // 1800)),
        line("done"),
        ranks=1,
    ).outputs.values()
    assert output.head[0].text == "learning rate 0.1" and output.lines[-1].text == "done"
    assert len(output.head) > 100 and len(output.lines) > 100 and 100 < output.forgotten < output.hidden
    box = strip(lines.render_box(0, output, is_open=True, number=7))
    assert (
        f"… {output.hidden:,} lines are left out here, of which {output.forgotten:,} are lost: log_dir= keeps all in "
        "files …"
    ) in box


@pytest.mark.parametrize("kept", [0, 30, 70, 95, 99])
def test_what_is_known_twice_is_kept_once(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first lines, and the newest ones, may have lines in common."""
    run = Run(make_job(nothing, 1), Told([line(f"{number}") for number in range(100)]))
    run.execute()
    every = run.record.find_lines()[0]
    monkeypatch.setattr(RunRecord, "find_lines", lambda record: {0: every[kept:]})
    monkeypatch.setattr(RunRecord, "find_tail", lambda record, rank: every[95:])
    monkeypatch.setattr(RunRecord, "find_head", lambda record, rank: every[:70])
    (output,) = lines.keep_all(make_picture(run), run.record).outputs.values()
    known = [str(number) for number in range(100) if number < 70 or number >= min(kept, 95)]
    assert texts(output.head) + texts(output.lines) == known
    assert bool(output.head) == (kept > 70) and output.forgotten == 100 - len(known)


def test_of_long_lines_the_page_says_that_they_are_cut_and_tells_them_apart() -> None:
    kept = keep(*(line("x" * 60_000 + f" of rank {rank}", rank) for rank in range(2) for _ in range(20)))
    assert not any(output.alike for output in kept.outputs.values())
    box = lines.render_box(1, kept.outputs[1], is_open=True, number=3)
    assert box.count(f"{'x' * 20_000}… (the rest of the line is left out)") == 20
    assert "long lines are cut: notebook_accel.runs().find(3).lines(1) has all" in box


def test_long_lines_are_whole_where_there_is_room() -> None:
    output = keep(line("x" * 300_000 + "END"), line("short")).outputs[0]
    box = lines.render_box(0, output, is_open=True, number=3)
    assert "xEND" in box and "left out" not in box and "cut" not in box


def test_the_newest_lines_stay_where_another_rank_has_written_much_since() -> None:
    few = [line(f"{number}") for number in range(MAX_TAIL + 100)]
    kept = keep(*few, *(line("x" * 2000, 1) for _ in range(MAX_BYTES // 2000)))
    assert texts(kept.outputs[0].lines) == [f"{number}" for number in range(MAX_TAIL + 100)]
    hidden = replace(kept.outputs[0], lines=kept.outputs[0].lines[100:], forgotten=100)
    assert lines.describe_hidden_lines(0, hidden).startswith("100 earlier lines, of which 100 are lost: log")
    assert lines.describe_hidden_lines(0, hidden, "/a") == "100 earlier lines: /a/rank_0.log has all"


def test_a_box_is_open_or_folded() -> None:
    output = Output(total=1, lines=(*split_lines(line("<b>")),))
    assert lines.render_box(0, output, is_open=True).startswith(
        '<details open><summary style="display:list-item">Output of rank 0: 1 line<'
    )
    assert lines.render_box(0, output, is_open=False).startswith("<details><summary")
    assert "&lt;b&gt;" in lines.render_box(0, output, is_open=False)
    assert lines.render_box(0, Output(), is_open=True) == ""
