"""Bars and unfinished lines in cells and terminals."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest

from notebook_accel.events import Display, Event, Lines, Phase, Progress, Unfinished
from notebook_accel.stream import sinks
from notebook_accel.stream.sinks import CellRows, TerminalRows, TextSink


class Terminal(io.StringIO):
    """An error stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_LIVE_SECONDS", 0.0)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that displays of a cell get; those that change one have a `>`."""
    shown: list[str] = []

    def publish(data: Any, metadata: Any = None, transient: Any = None, *, update: bool = False) -> None:
        shown.append(f"{'>' if update else ''}{data['text/plain']}")

    monkeypatch.setattr(sinks, "publish", publish)
    return shown


def bar(number: int, text: str, rank: int = 0, **options: Any) -> Progress:
    return Progress(
        rank=rank, time=0.0, bar=number, description="", count=0.0, total=None, text=text, **options
    )


def unfinished(text: str, rank: int = 0) -> Unfinished:
    return Unfinished(rank=rank, time=0.0, stream="stdout", text=text)


def line(text: str, rank: int = 0) -> Lines:
    return Lines(rank=rank, time=0.0, stream="stdout", texts=(text,))


def test_an_unfinished_line_is_a_display_that_becomes_a_line(cell: list[str]) -> None:
    rows = CellRows()
    rows.show_unfinished(unfinished("10%"))
    rows.show_unfinished(unfinished("10%"))
    rows.show_unfinished(unfinished("20%", 1), "[1] ")
    rows.show_unfinished(unfinished("90%"))
    assert rows.has_rows
    rows.finish(line("done"))
    rows.finish(line("other stream or none", 2))
    assert cell == ["10%", "[1] 20%", ">90%", ">"]
    rows.close()


def test_nested_bars_are_displays_of_their_own(cell: list[str]) -> None:
    rows = CellRows()
    rows.show_bar(bar(0, "outer 0"))
    for number in (1, 2):
        rows.show_bar(bar(number, f"inner {number}"))
        rows.show_bar(bar(number, "ended", finished=True, leave=False))
    rows.show_bar(bar(0, "outer 1", rank=1))
    rows.show_bar(bar(0, "outer 1", finished=True))
    assert cell == ["outer 0", "inner 1", ">", "inner 2", ">", ">outer 1"]


def test_the_first_rank_takes_over_the_displays_of_another(cell: list[str]) -> None:
    rows = CellRows()
    rows.show_bar(bar(0, "of rank 1", rank=1))
    rows.show_bar(bar(0, "of rank 0"))
    rows.show_bar(bar(0, "of rank 1", rank=1, finished=True))
    rows.show_bar(bar(0, "end of rank 0", finished=True))
    assert cell == ["of rank 1", ">of rank 0", ">end of rank 0"]


def test_a_terminal_shows_nested_bars_below_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    rows = TerminalRows()
    rows.show_bar(bar(0, "outer"))
    rows.show_bar(bar(1, "inner"))
    rows.clear()
    rows.draw()
    rows.show_bar(bar(1, "inner at its end", finished=True))
    rows.draw()
    rows.show_bar(bar(0, "outer", finished=True))
    rows.close()
    both, erase = "outer\ninner", "\r\x1b[K\x1b[A\x1b[K"
    assert errors.getvalue() == (
        f"\r\x1b[Kouter\r\x1b[K{both}{erase}\r\x1b[K{both}{erase}inner at its end\n\r\x1b[Kouter\r\x1b[Kouter\n"
    )


def test_bars_of_ranks_that_ended_do_not_stay_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    sink = TextSink("all")
    sink.show([Phase(rank=rank, time=0.0, name="starting") for rank in range(2)])
    sink.show([bar(7, "of rank 1", rank=1), bar(0, "of rank 0")])
    sink.show([Phase(rank=-1, time=0.0, name="restarting", detail="again")])
    sink.show([Phase(rank=1, time=0.0, name="starting"), bar(0, "of the second attempt", rank=1)])
    sink.close()
    erase = "\r\x1b[K"
    assert errors.getvalue() == (
        f"{erase}of rank 1{erase}of rank 0{erase}notebook_accel: again\n{erase}of the second attempt{erase}"
    )


def test_lines_do_not_follow_what_is_unfinished_on_its_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = Terminal()
    monkeypatch.setattr(sys, "stderr", both)
    monkeypatch.setattr(sys, "stdout", both)
    sink = TextSink("all")
    ranks: list[Event] = [Phase(rank=rank, time=0.0, name="starting") for rank in range(2)]
    sink.show([*ranks, unfinished("name? ")])
    sink.show([line("from the other rank", 1)])
    sink.show([line("name? Ann")])
    sink.close()
    erase = "\r\x1b[K"
    assert both.getvalue() == (
        f"{erase}[0] name? {erase}[1] from the other rank\n{erase}[0] name? {erase}[0] name? Ann\n"
    )


def test_a_file_has_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TextSink("all")
    sink.show([Phase(rank=0, time=0.0, name="starting"), unfinished("10%"), line("100%"), bar(0, "1/2")])
    sink.show([bar(0, "2/2", finished=True), unfinished("rest")])
    sink.close()
    assert capsys.readouterr() == ("100%\n", "2/2\n")


def test_the_start_of_a_rank_makes_no_prefix_of_the_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def write(template: str, rank: int, first: int) -> str:
        made.append(rank)
        return f"{rank - first}: "

    monkeypatch.setattr(sinks, "_write_prefix", write)
    sink = TextSink("all", prefix="${local_rank}: ")
    for rank in (3, 4, *range(5, 500), 2):
        sink.show([Phase(rank=rank, time=0.0, name="starting")])
    assert len(made) < 2 * 500 and sink._prefixes[499] == "497: ", "but where the first rank comes late"


@pytest.mark.parametrize("ranks", [1, 2])
def test_displays_of_several_ranks_say_whose_they_are(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    sink = TextSink("all")
    sink.show([Phase(rank=rank, time=0.0, name="starting") for rank in range(ranks)])
    display = Display(rank=ranks - 1, time=0.0, data={"text/plain": "<Figure>"})
    sink.show(
        [display, replace(display, update=True), display, line("a"), display, line("b", ranks - 1), display]
    )
    sink.close()
    titled = "[1]\n<Figure>\n<Figure>\n[0] a\n[1]\n<Figure>\n[1] b\n<Figure>\n"
    plain = "<Figure>\n<Figure>\na\n<Figure>\nb\n<Figure>\n"
    assert capsys.readouterr().out == (titled if ranks > 1 else plain)


def test_a_display_below_a_row_of_another_rank_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    sink = TextSink("all")
    sink.show([Phase(rank=rank, time=0.0, name="starting") for rank in range(2)])
    sink.show([line("a"), unfinished("50%", 1), Display(rank=0, time=0.0, data={"text/plain": "<Figure>"})])
    sink.close()
    assert capsys.readouterr().out == "[0] a\n[0]\n<Figure>\n"
