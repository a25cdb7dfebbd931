"""Tests for what a terminal shows of a run of scripts."""

from __future__ import annotations

import pytest

from notebook_accel.cli.console import Console
from notebook_accel.events import Display, Event, Lines, Notice, Phase, Stream, Traceback, Unfinished


def line(rank: int, text: str, stream: Stream = "stdout") -> Lines:
    return Lines(rank=rank, time=0.0, stream=stream, texts=(text,))


def started(*ranks: int) -> list[Event]:
    return [Phase(rank=rank, time=0.0, name="starting") for rank in ranks]


def console(prefix: str = "", *, quiet: bool = False) -> Console:
    return Console("all", prefix, role="trainer", quiet=quiet)


def test_lines_go_to_the_stream_that_they_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console("<${role_name} ${rank}> ")
    shown.show([*started(4, 5), line(4, "a"), line(5, "b"), line(5, "c", "stderr"), line(4, "d")])
    assert capsys.readouterr() == ("<trainer 4> a\n<trainer 5> b\n<trainer 4> d\n", "<trainer 5> c\n")


def test_displays_are_lines_of_the_ranks_that_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Console(frozenset({1}), "<${rank}> ", role="trainer", quiet=False)
    shown.show([*started(0, 1), *(Display(rank=n, time=0.0, data={"text/plain": "a\nb"}) for n in range(2))])
    assert capsys.readouterr() == ("<1> a\n<1> b\n", "")


def test_the_first_traceback_of_each_attempt_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console()
    shown.show([Traceback(rank=0, time=0.2, text="two\n"), Traceback(rank=1, time=0.1, text="one\n")])
    shown.show([Phase(rank=-1, time=0.0, name="restarting", detail="again")])
    shown.show([Traceback(rank=0, time=0.3, text="three\n")])
    shown.close()
    assert capsys.readouterr().err == "one\nnotebook-accel: again\nthree\n"


def test_who_asks_for_quiet_reads_scripts_only(capsys: pytest.CaptureFixture[str]) -> None:
    shown = console(quiet=True)
    shown.show([*started(0), Notice(rank=-1, time=0.0, text="hangs"), line(0, "a")])
    assert capsys.readouterr() == ("a\n", "")


def test_a_file_has_lines_and_no_states_of_bars(capsys: pytest.CaptureFixture[str]) -> None:
    half = Unfinished(rank=0, time=0.0, stream="stderr", text="50%")
    shown = console()
    shown.show([*started(0), half, line(0, "100%", "stderr")])
    shown.close()
    assert capsys.readouterr().err == "100%\n"
