"""Lines survive any splitting of the byte stream, and are what a terminal would show."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tqdm import tqdm

from notebook_accel.stream.lines import LineReader


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20), max_size=6
    ),
    st.lists(st.integers(min_value=0), max_size=8),
)
def test_lines_of_any_split(texts: list[str], places: list[int]) -> None:
    reader = LineReader()
    lines = [line for chunk in _cut("\n".join(texts).encode(), places) for line in reader.feed(chunk)]
    rest = reader.close()
    assert lines + rest == (texts if texts and texts[-1] else texts[:-1])


def test_a_carriage_return_overwrites_and_bad_bytes_are_shown() -> None:
    reader = LineReader()
    assert reader.feed(b"10%\r50%\r") == []
    assert reader.feed(b"100%\r\nnext \xff\n") == ["100%", "next \\xff"]
    assert reader.feed(b"x" * 3_000_000)[0] == "x" * (1 << 20)


@pytest.mark.parametrize("character", ["\u00e9", "\u20ac", "\U0001f600"])
def test_no_character_is_cut(character: str) -> None:
    text = "x" * ((1 << 20) - 1) + character * 3
    reader = LineReader()
    lines = reader.feed(text.encode()) + reader.close()
    assert "".join(lines) == text and lines[0] == "x" * ((1 << 20) - 1)


def test_what_is_no_text_is_cut_too() -> None:
    reader = LineReader()
    lines = reader.feed(b"\x80" * (1 << 20) + b"\x80" * 9) + reader.close()
    assert "".join(lines) == "\\x80" * ((1 << 20) + 9) and len(lines) == 2


def test_a_line_can_be_seen_before_it_is_finished() -> None:
    reader = LineReader()
    assert reader.unfinished == ""
    for data, shown in (
        (b"one\ntw", "tw"),
        (b"o\r10%", "10%"),
        (b"\r50%\r", "50%"),
        (b"\n", "50%"),
        (b"name? ", "50%\nname? "),
    ):
        reader.feed(data)
        assert reader.unfinished == shown
    assert reader.settle() == ["50%"] and reader.unfinished == "name? "
    assert reader.close() == ["name? "]


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from([b"a", b"bc", b"\n", b"\r", b"\x1b[A", b"\x1b[31m", b"\x1b", b"  ", b"\xe2\x82\xac"]),
        max_size=12,
    ),
    st.lists(st.integers(min_value=0), max_size=8),
)
@example([b"a\r\nx\x1b\x1b[0m b\n"], [2, 6])
def test_moves_of_any_split(parts: list[bytes], places: list[int]) -> None:
    data = b"".join(parts)
    whole, pieces = LineReader(), LineReader()
    expected = [*whole.feed(data), *whole.close()]
    assert [line for chunk in _cut(data, places) for line in pieces.feed(chunk)] + pieces.close() == expected


def test_a_part_of_a_move_comes_after_what_came_with_it() -> None:
    reader = LineReader()
    assert reader.feed(b"50%\r") + reader.feed(b"60%\nbc\x1b") + reader.feed(b"[31mbc\n") == [
        "60%",
        "bc\x1b[31mbc",
    ]


class Terminal(io.StringIO):
    """Where tqdm draws; what it wrote is read as a stream of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = LineReader()
        self.lines: list[str] = []
        self.shown: list[list[str]] = []

    def write(self, text: str) -> int:
        self.lines += self.reader.feed(text.encode())
        self.shown.append([row.strip() for row in self.reader.unfinished.split("\n") if row.strip()])
        return len(text)


@pytest.mark.parametrize("leave", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_nested_bars_are_no_wall_of_lines(levels: int, leave: bool) -> None:
    terminal = Terminal()

    def count(level: int) -> None:
        options: dict[str, Any] = {"file": terminal, "mininterval": 0, "ascii": True, "ncols": 60}
        for _ in tqdm(range(2), leave=leave or level == 0, **options):
            if level + 1 < levels:
                count(level + 1)

    count(0)
    print("the end", file=terminal)
    lines = [line.rstrip() for line in terminal.lines + terminal.reader.close() if line.strip()]
    left = 2**levels - 1 if leave else 1
    assert lines[-1] == "the end" and len(lines) == 1 + left, lines
    assert all(line.startswith("100%") and "2/2" in line for line in lines[:-1])
    shown = [rows for rows in terminal.shown if len(rows) == levels and all("/2" in row for row in rows)]
    assert shown, "the outer bar stands above the inner ones"


def test_a_row_that_was_overwritten_is_a_line_when_another_one_follows() -> None:
    reader = LineReader()
    assert reader.feed(b"\r50%\r100%\n") == []
    assert reader.feed(b"next\n") == ["100%", "next"]
    assert reader.feed(b"\rbar\n\n") == ["bar", ""]
    assert reader.feed(b"a\r\nb\r\n") == ["a", "b"], "as programs write for a terminal"
    many = b"".join(b"\r%d\r%d\n" % (number, number) for number in range(100))
    found = reader.feed(many)
    assert len(found) == 68 and found + reader.settle() == [str(number) for number in range(100)]


def test_the_cursor_does_not_go_above_what_is_a_line() -> None:
    reader = LineReader()
    assert reader.feed(b"one\ntwo\n\x1b[5A") == ["one", "two"]
    assert reader.feed(b"three\n\x1b[2") == ["three"]
    assert reader.close() == ["\x1b[2"]


def test_a_move_over_more_rows_than_a_terminal_has_is_text() -> None:
    """Python reads no number of so many digits."""
    data = b"above\n\x1b[" + b"7" * 5000 + b"A\nbelow\n"
    assert LineReader().feed(data) == ["above", "\x1b[" + "7" * 5000 + "A", "below"]


def test_what_torch_says_of_its_groups_is_no_output_of_a_rank() -> None:
    said = b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    reader = LineReader()
    assert reader.feed(said) == [] and not reader.has_more
    assert reader.feed(b"a\n" + said + b"b\n" + said + b"c") == ["a", "b"] and reader.unfinished == "c"
    mine = "[Gloo] Rank 0 is mine"
    assert reader.feed(f"\n{mine}\n".encode()) == ["c", mine]
    for cut in range(1, len(said)):
        assert reader.feed(said[:cut]) + reader.feed(said[cut:]) == [] and not reader.has_more


LOST_STORE = """before
[W1128 11:45:28.127331721 TCPStore.cpp:138] [c10d] recvValue failed on SocketImpl(fd=7): Failed to recv, got 0 bytes.
Exception raised from recvBytes at c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fd016cf4b8d in libc10.so)
frame #1: <unknown function> + 0x674888d (0x7fd006f4888d in libtorch_cpu.so)
<omitting python frames>
frame #43: <unknown function> + 0x2724a (0x7fd01784524a in libc.so.6)

after

"""


@settings(max_examples=100)
@given(st.lists(st.integers(min_value=0), max_size=8))
def test_frames_below_the_warning_of_a_lost_store_are_left_out(places: list[int]) -> None:
    """Also of two warnings, one below the other, and wherever the stream is split."""
    reader = LineReader()
    lines = [line for chunk in _cut(2 * LOST_STORE.encode(), places) for line in reader.feed(chunk)]
    warning = LOST_STORE.splitlines()[1]
    assert lines == 2 * ["before", warning, "after", ""]


def test_other_frames_stay() -> None:
    """Those of other warnings, and what a program prints itself."""
    for other in (LOST_STORE.replace("TCPStore.cpp", "ProcessGroupNCCL.cpp"), LOST_STORE[100:]):
        assert LineReader().feed(other.encode()) == other.splitlines()
