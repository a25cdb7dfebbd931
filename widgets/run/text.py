"""Sinks without widgets: a text in the notebook that changes, lines that are printed, or errors only."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Final

from notebook_accel import probes
from notebook_accel.events import Event, Notice
from notebook_accel.launch.run import Run
from notebook_accel.notices import tell
from notebook_accel.stream.record import MAX_TAIL
from notebook_accel.stream.sinks import Sink, TextSink, publish

from . import ansi, page
from .picture import Picture, make_picture

_INTERVAL: Final = 0.2


class TextDisplay(Sink):
    """Shows a background run in a notebook as one text that changes: the cell that launched it has ended by then.

    Args:
        run: what to show.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._names: list[str] = []
        self._shown = ""
        self._next = 0.0
        self.again()

    def show(self, events: Sequence[Event]) -> None:
        """Update the text, at most five times a second.

        Args:
            events: not used: the text is made from the record of the run.
        """
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            self._draw()

    def note(self, text: str) -> None:
        """Do nothing: the final text has the message.

        Args:
            text: the message.
        """

    def close(self) -> None:
        """Show the final text."""
        self._draw()

    def again(self) -> bool:
        """Show the text in the cell that runs now, too.

        Returns:
            Always True.
        """
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
        return render_lines_and_status(make_picture(self._run))


def render_lines_and_status(shown: Picture) -> str:
    """Return the newest lines of all ranks in the order of time, and below them the status of the run.

    Args:
        shown: the run.
    """
    several = len(shown.outputs) > 1
    newest = sorted(
        (row for output in shown.outputs.values() for row in output.rows), key=lambda row: row.time
    )
    lines = [f"[{line.rank}] {line.text}" if several else line.text for line in newest[-MAX_TAIL:]]
    return "\n".join([*map(ansi.strip_escapes, lines), page.render_text(shown, last=0)])


class PrintedRun(TextSink):
    """Prints lines as they come. If a background run fails, one more line says so.

    Args:
        run: what to show.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.job.output, run.job.prefix)
        self._run = run

    def close(self) -> None:
        """Print what is left, and the failure of a background run."""
        if self._run.job.background and self._run.status == "failed":
            self.note(f"{self._run!r}; result() raises it")
        super().close()

    def again(self) -> bool:
        """Show the run as a text in the cell that runs now.

        Returns:
            Whether it was shown; False in a terminal.
        """
        if probes.find_kernel_shell() is None:
            return False
        TextDisplay(self._run)
        return True


class ErrorsOnly(Sink):
    """Shows only messages of the launcher and the failure of a background run, until `again` opens the view.

    A launch that blocks raises its failure in the cell, so nothing is printed for it.

    Args:
        run: what to show.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._view: Sink | None = None

    def show(self, events: Sequence[Event]) -> None:
        """Print messages of the launcher itself, or update the view if it is open.

        Args:
            events: the next events of the run.
        """
        if self._view is not None:
            self._view.show(events)
            return
        for event in events:
            if isinstance(event, Notice):
                self.note(event.text)

    def note(self, text: str) -> None:
        """Print a message of the launcher itself to stderr.

        Args:
            text: the message.
        """
        tell(text)

    def close(self) -> None:
        """Print that a background run failed, or close the view if it is open."""
        if self._view is not None:
            self._view.close()
        elif self._run.job.background and self._run.status == "failed":
            self.note(f"{self._run!r}; result() raises it")

    def again(self) -> bool:
        """Open the view of widgets in the cell that runs now.

        Returns:
            Whether it was shown; False in a terminal.
        """
        if probes.find_kernel_shell() is None:
            return False
        from .view import RunView

        if self._view is not None:
            return self._view.again()
        self._view = RunView(self._run)
        if self._run.is_over:
            self._view.close()
        return True
