"""What a run of a script shows in the terminal: whole lines of its ranks, one bar, and one traceback."""

from __future__ import annotations

import contextlib
import string
import sys
import time
from collections.abc import Sequence
from typing import Final

from ..events import Display, Event, Failure, Lines, Notice, Phase, Progress, Stream, Traceback, Unfinished
from ..stream.sinks import Output, Sink, TerminalRows, join_lines, write_lines

_HOLD_SECONDS: Final = 0.3  # in which the traceback of a rank that failed earlier may come


class Console(Sink):
    """Writes what the ranks of a run write: their output to the output, and their errors to the error stream.

    Args:
        output: ranks to show.
        prefix: template of the text before each line; it may name rank, local_rank and role_name.
        role: what `role_name` stands for.
        quiet: whether to leave out what the launcher itself has to say.

    Attributes:
        failures: of the last attempt, in the order in which they came.
        first_rank: the lowest rank of this node.
    """

    def __init__(self, output: Output, prefix: str, *, role: str, quiet: bool) -> None:
        self._output = output
        self._template = string.Template(prefix)
        self._role = role
        self._quiet = quiet
        self._ranks: set[int] = set()
        self._prefixes: dict[int, str | None] = {}
        self._has_traceback = False
        self._tracebacks: list[Traceback] = []
        self._held_since = 0.0
        self._rows = TerminalRows()
        self.failures: list[Failure] = []

    @property
    def first_rank(self) -> int:
        return min(self._ranks, default=0)

    def show(self, events: Sequence[Event]) -> None:
        """Show the next events of the run."""
        pending: list[str] = []
        stream: Stream = "stdout"
        for event in events:
            if isinstance(event, Lines):
                if self._rows.has_rows:
                    self._rows.finish(event)
                prefix = self._prefix(event.rank)
                if prefix is None:
                    continue
                if event.stream != stream:
                    self._write(stream, pending)
                    stream, pending = event.stream, []
                pending.append(join_lines(event.texts, prefix))
                continue
            self._write(stream, pending)
            pending = []
            self._show_other(event)
        self._write(stream, pending)
        if self._tracebacks and time.monotonic() - self._held_since > _HOLD_SECONDS:
            self._show_first_traceback()
        self._rows.draw()

    def _show_other(self, event: Event) -> None:
        if isinstance(event, Phase):
            self._note_phase(event)
        elif isinstance(event, Notice):
            self.say(event.text)
        elif isinstance(event, Failure):
            self.failures.append(event)
        elif isinstance(event, Traceback):
            self._held_since = self._held_since if self._tracebacks else time.monotonic()
            self._tracebacks.append(event)
        elif isinstance(event, Unfinished) and (prefix := self._prefix(event.rank)) is not None:
            self._rows.show_unfinished(event, prefix)
        elif isinstance(event, Progress) and self._prefix(event.rank) is not None:
            if self._rows.is_live:
                self._rows.show_bar(event)
            elif event.finished and event.leave:
                self._write("stderr", [f"{event.text}\n"])
        elif isinstance(event, Display):
            self._show_display(event)

    def _show_display(self, display: Display) -> None:
        prefix = self._prefix(display.rank)
        if prefix is not None and not display.update:
            lines = str(display.data.get("text/plain", "")).split("\n")
            self._write("stdout", [f"{prefix}{line}\n" for line in lines])

    def _note_phase(self, phase: Phase) -> None:
        if phase.name == "restarting":
            self._show_first_traceback()
            self.say(phase.detail)
            self._ranks.clear()
            self._rows.restart()
            self.failures.clear()
            self._has_traceback = False
        elif phase.name == "starting" and phase.rank >= 0:
            self._ranks.add(phase.rank)
            self._prefixes.clear()

    def _prefix(self, rank: int) -> str | None:
        """Return what stands before a line; None for lines that are not shown."""
        if rank not in self._prefixes:
            self._prefixes[rank] = self._make_prefix(rank)
        return self._prefixes[rank]

    def _make_prefix(self, rank: int) -> str | None:
        local_rank = rank - self.first_rank
        if isinstance(self._output, str):
            is_shown = self._output == "all" or (self._output == "first" and local_rank == 0)
        else:
            is_shown = rank in self._output
        if not is_shown:
            return None
        names = {"rank": rank, "local_rank": local_rank, "role_name": self._role}
        return self._template.safe_substitute(names)

    def show_traceback(self, text: str) -> None:
        """Show the traceback of a rank; of all ranks of an attempt the first is shown."""
        if text and not self._has_traceback:
            self._has_traceback = True
            self._write("stderr", [text])

    def _show_first_traceback(self) -> None:
        first = min(self._tracebacks, key=lambda one: one.time, default=None)
        self._tracebacks.clear()
        if first is not None:
            self.show_traceback(first.text)

    @property
    def has_traceback(self) -> bool:
        """Whether the traceback of a rank of this attempt was shown."""
        return self._has_traceback

    def say(self, text: str) -> None:
        """Show what the launcher itself has to say."""
        if not self._quiet:
            self._write("stderr", [f"notebook-accel: {line}\n" for line in text.splitlines()])

    def note(self, text: str) -> None:
        """Leave it out: `cli.start` says how the run ended."""

    def close(self) -> None:
        """Remove the bar, and leave everything written."""
        self._show_first_traceback()
        self._rows.close()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # it was closed before this process began
                with contextlib.suppress(BrokenPipeError):  # its reader has gone, and has ended the run
                    stream.flush()

    def _write(self, stream: Stream, lines: Sequence[str]) -> None:
        if lines:
            self._rows.clear()
            write_lines(stream, lines)
