"""Runs as text where no widget shows them: in a display that changes, in a terminal, or errors only."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from typing import Final

from notebook_accel.events import Event, Notice
from notebook_accel.launch.run import Run
from notebook_accel.stream.record import MAX_TAIL
from notebook_accel.stream.sinks import Sink, TextSink, kernel_shell, publish

from . import ansi, page
from .picture import Picture, picture

_INTERVAL: Final = 0.2


class TextDisplay(Sink):
    """Shows a background run in a notebook as one text that changes: what it prints comes when its cell has ended."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._names: list[str] = []
        self._shown = ""
        self._next = 0.0
        self.again()

    def show(self, events: Sequence[Event]) -> None:
        """Change the text, five times a second at most."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            self._draw()

    def note(self, text: str) -> None:
        """Leave it to the final text, which has it."""

    def close(self) -> None:
        """Show the final text."""
        self._draw()

    def again(self) -> bool:
        """Show the text in the cell that runs now, too."""
        name = f"notebook-accel-{uuid.uuid4().hex}"
        self._names.append(name)
        publish({"text/plain": self._text()}, transient={"display_id": name})
        return True

    def _draw(self) -> None:
        text = self._text()
        if text != self._shown:
            self._shown = text
            for name in self._names:
                publish({"text/plain": text}, transient={"display_id": name}, update=True)

    def _text(self) -> str:
        return as_text(picture(self._run))


def as_text(shown: Picture) -> str:
    """Return the newest lines of all ranks in the order in which they came, and how the run stands below them."""
    several = len(shown.outputs) > 1
    newest = sorted(
        (line for output in shown.outputs.values() for line in output.lines), key=lambda line: line.time
    )
    lines = [f"[{line.rank}] {line.text}" if several else line.text for line in newest[-MAX_TAIL:]]
    return "\n".join([*map(ansi.bare, lines), page.plain(shown, last=0)])


class PrintedRun(TextSink):
    """Prints lines as they come, and after a background run that failed a line that says so."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.job.output, run.job.prefix)
        self._run = run

    def close(self) -> None:
        """Draw what is held back."""
        if self._run.job.background and self._run.status == "failed":
            self.note(f"{self._run!r}; result() raises it")
        super().close()

    def again(self) -> bool:
        """Show the text in the cell that runs now, where one does."""
        if kernel_shell() is None:
            return False
        TextDisplay(self._run)
        return True


class ErrorsOnly(Sink):
    """Shows nothing but what went wrong, until `again` asks for more; a launch that blocks raises that anyway."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._view: Sink | None = None

    def show(self, events: Sequence[Event]) -> None:
        """Show what the launcher itself has to say, or the view that was asked for."""
        if self._view is not None:
            self._view.show(events)
            return
        for event in events:
            if isinstance(event, Notice):
                self.note(event.text)

    def note(self, text: str) -> None:
        """Print a message of the launcher itself."""
        print(f"notebook_accel: {text}", file=sys.stderr)

    def close(self) -> None:
        """Say where a background run failed."""
        if self._view is not None:
            self._view.close()
        elif self._run.job.background and self._run.status == "failed":
            self.note(f"{self._run!r}; result() raises it")

    def again(self) -> bool:
        """Show the view of widgets in the cell that runs now, where one does."""
        if kernel_shell() is None:
            return False
        from .view import RunView

        if self._view is not None:
            return self._view.again()
        self._view = RunView(self._run)
        if self._run.is_over:
            self._view.close()
        return True
