"""Lines of text on a byte stream that is split anywhere, as a terminal shows them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ..events import Line, Lines

_MAX_LINE: Final = 1 << 20
_MAX_ROWS: Final = 32  # of bars below each other
_MOVES: Final = re.compile(rb"\n|\x1b\[\d{0,4}A")  # to the next row, or some rows up (ECMA-48, 8.3.22)
_UP: Final = re.compile(rb"\x1b\[\d{0,4}A")  # nothing has so many rows that more digits are needed
_PART_OF_UP: Final = re.compile(rb"\x1b(?:\[\d{0,4})?\Z")
_NOISE_START: Final = b"[Gloo] Rank "
_NOISE: Final = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+"
)
"""What torch 2.8 says of each process group, as no other version does."""
_FRAMES_START: Final = b"Exception raised from "
_FRAME: Final = re.compile(r"frame #\d+: .*|<omitting python frames>|")
_LOST_STORE: Final = re.compile(r"\[W\d+ [\d:.]+ TCPStore\.cpp:\d+\] .*")
"""What torch warns of where the store is gone, in a line; all frames of its C++ code follow."""
_LINE_SLOTS: Final = [getattr(Line, name).__set__ for name in ("rank", "time", "stream", "text")]
"""Of the class itself: in Python 3.10 it has its own ones of what it inherits."""


@dataclass(slots=True)
class _Row:
    """A row of the terminal.

    Attributes:
        text: what is visible of it.
        is_bar: whether text of it was overwritten.
    """

    text: bytes = b""
    is_bar: bool = False

    def write(self, data: bytes) -> None:
        whole = self.text + data
        self.is_bar = self.is_bar or b"\r" in whole.rstrip(b"\r")
        self.text = _visible(whole)


class LineReader:
    """Collects received bytes and returns whole lines as text.

    A carriage return inside a line overwrites what is before it, as on a terminal. So does what is written after the
    cursor has gone up: bars that are nested, such as tqdm's, go down a row and up again at each change. A row that was
    overwritten is therefore no line yet when a newline ends it, but when another line follows, or after `settle`.

    The frames of C++ below a warning of torch that a store is gone are left out.

    Bytes that are not UTF-8 become backslash escapes. A line of more than 1 MiB is cut there.
    """

    def __init__(self) -> None:
        self._rows = [_Row()]  # that are no lines yet
        self._at = 0  # the cursor's
        self._part = b""  # of an escape sequence
        self._last = ""  # line that was complete
        self._is_in_frames = False

    @property
    def unfinished(self) -> str:
        """What the last rows show so far, where no newline ends them for good: bars or a question perhaps."""
        return "\n".join(_text(row.text) for row in self._rows).strip("\n")

    @property
    def has_more(self) -> bool:
        """Whether there is something that is no line yet."""
        return len(self._rows) > 1 or bool(self._rows[0].text)

    def feed(self, data: bytes) -> list[str]:
        """Add bytes, and return the lines that they complete.

        Args:
            data: as received.
        """
        before = self._rows[self._at].text
        is_noisy = self._is_in_frames or any(
            start in data or (bool(before) and start.startswith(before[: len(start)]))
            for start in (_NOISE_START, _FRAMES_START)
        )
        lines = self._feed(self._part + data)
        if is_noisy:
            return [line for line in lines if not self._is_noise(line)]
        if lines:
            self._last = lines[-1]
        return lines

    def _is_noise(self, line: str) -> bool:
        """Return whether to leave out the next line."""
        if self._is_in_frames and _FRAME.fullmatch(line):
            self._is_in_frames = bool(line)
            return True
        is_first = line.startswith(_FRAMES_START.decode())
        self._is_in_frames = is_first and bool(_LOST_STORE.fullmatch(self._last))
        self._last = line
        return self._is_in_frames or bool(_NOISE.fullmatch(line))

    def _feed(self, data: bytes) -> list[str]:
        self._part = b""
        if b"\x1b" in data and (part := _PART_OF_UP.search(data)):
            data, self._part = data[: part.start()], part[0]
        if len(self._rows) == 1 and b"\r" not in data and not (b"\x1b" in data and _UP.search(data)):
            return self._feed_plain(data)
        position = 0
        lines: list[str] = []
        for move in _MOVES.finditer(data):
            self._write(data[position : move.start()])
            position = move.end()
            lines += self._go_down() if move[0] == b"\n" else self._go_up(int(move[0][2:-1] or 1))
        self._write(data[position:])
        return lines + self._cut()

    def settle(self) -> list[str]:
        """Return the rows above the cursor as lines: it does not go up to them any more."""
        return self._take(self._at)

    def close(self) -> list[str]:
        """Return what is left as lines; rows below the last newline count where they show something."""
        self._rows[self._at].write(self._part)
        whole, rest = self._rows[: self._at], self._rows[self._at :]
        kept = whole + [row for row in rest if row.text.strip(b" \r" if row.is_bar else b"")]
        self._rows, self._at, self._part = [_Row()], 0, b""
        return [_text(row.text) for row in kept]

    def _feed_plain(self, data: bytes) -> list[str]:
        """Do what `feed` does where nothing is overwritten: most lines come here."""
        row = self._rows[0]
        first, newline, others = data.partition(b"\n")
        row.write(first)
        if not newline:
            return self._cut()
        if row.is_bar or b"\r" in row.text:
            part, self._part = self._part, b""  # it comes after the others
            lines = self._go_down() + self._feed(others)
            self._part += part
            return lines
        whole, newline, rest = (row.text + b"\n" + others).rpartition(b"\n")
        row.text = rest
        return whole.decode("utf-8", "backslashreplace").split("\n") + self._cut()

    def _write(self, data: bytes) -> None:
        if data:
            self._rows[self._at].write(data)

    def _go_down(self) -> list[str]:
        """Go to the beginning of the next row; return the lines that this ends."""
        is_over = not self._rows[self._at].is_bar
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        elif self._rows[self._at].text:
            self._rows[self._at].text = self._rows[self._at].text.rstrip(b"\r") + b"\r"
        return self._take(self._at if is_over else max(0, self._at - _MAX_ROWS))

    def _go_up(self, count: int) -> list[str]:
        self._at = max(0, self._at - count)
        return []

    def _take(self, count: int) -> list[str]:
        taken, self._rows = self._rows[:count], self._rows[count:]
        self._at -= count
        return [_text(row.text) for row in taken]

    def _cut(self) -> list[str]:
        row, lines = self._rows[self._at], []
        while len(row.text) > _MAX_LINE:
            end = _find_character(row.text, _MAX_LINE)
            lines.append(_text(row.text[:end]))
            row.text = row.text[end:]
        return lines


def _find_character(text: bytes, position: int) -> int:
    """Return where the character begins that a byte belongs to; in what is no UTF-8 each byte is one."""
    for start in range(position, max(0, position - 4), -1):
        if text[start] & 0xC0 != 0x80:  # the others go on with a character (RFC 3629)
            return start
    return position


def _visible(line: bytes) -> bytes:
    """Return what carriage returns leave visible of a row; one at its end has overwritten nothing yet."""
    shown = line.rstrip(b"\r")
    return shown[shown.rfind(b"\r") + 1 :] + (b"\r" if len(shown) < len(line) else b"")


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode("utf-8", "backslashreplace")


def split_lines(lines: Lines) -> list[Line]:
    """Return lines one by one, in a third of the time that their class takes for each.

    Args:
        lines: that came together.
    """
    set_rank, set_time, set_stream, set_text = _LINE_SLOTS
    new = object.__new__
    found = []
    for text in lines.texts:
        line = new(Line)
        set_rank(line, lines.rank)
        set_time(line, lines.time)
        set_stream(line, lines.stream)
        set_text(line, text)
        found.append(line)
    return found
