"""RunView: shows a run as widgets while it runs, and as a static page after its end."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from notebook_accel.events import ClearOutput, Display, Event, Phase
from notebook_accel.launch.run import GRACE, Run
from notebook_accel.notices import tell
from notebook_accel.stream.sinks import Sink, publish

from . import page, ranks
from .lines import keep_all
from .panel import Panel
from .picture import Picture, Usage, make_picture
from .usage import Meter

INTERVAL: Final = 0.2
_WIDGET: Final = "application/vnd.jupyter.widget-view+json"
_SHARE: Final = 0.05  # of all time, which drawing may take


class RunView(Sink):
    """Draws a run, at most five times a second.

    The view may be open in several cells. All of them show the same widgets, and at the end each becomes a static page.

    Args:
        run: what to draw.
        at_once: whether to open the view now. False opens it at the first event that is not a phase. This is for a
            function that runs in this process: without metrics or progress it needs no view.
    """

    def __init__(self, run: Run, *, at_once: bool = True) -> None:
        self._run = run
        self._panel: Panel | None = None
        self._shown: list[str] = []
        self._meter = Meter()
        self._rank_displays: dict[int, _RankDisplays] = {}
        self._next = 0.0
        self._closed = False
        self._broken = False
        self._lock = threading.Lock()
        if at_once:
            self._open()

    def show(self, events: Sequence[Event]) -> None:
        """Draw the run, if it is time to. If drawing fails, the view prints the error once and stops drawing.

        Args:
            events: the next events of the run.
        """
        if not self._run.job.background:
            for event in events:
                if isinstance(event, (Display, ClearOutput)):
                    self._show_display(event)
        if self._broken:
            return
        try:
            if self._panel is None and any(not isinstance(event, Phase) for event in events):
                self._open()
            now = time.monotonic()
            if self._panel is not None and now >= self._next:
                with self._lock:
                    self._panel.show(self._make_picture())
                self._next = now + max(INTERVAL, (time.monotonic() - now) / _SHARE)
        except Exception as error:
            self._broken = True
            tell(f"the view of {self._run.job.name} is broken: {error!r}")

    def note(self, text: str) -> None:
        """Print a message of the launcher itself to stderr, unless the run is in the background.

        Args:
            text: the message.
        """
        if not self._run.job.background:
            tell(text)

    def close(self) -> None:
        """Replace the widgets in every cell by a static page."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._panel is not None:
                final = self._make_final()
                self._panel.end(page.make_bundle(self._make_picture())["text/html"])
                for name in self._shown:
                    publish(final, transient={"display_id": name}, update=True)
                self._shown.clear()
            self._meter.close()

    def again(self) -> bool:
        """Show the view in the cell that runs now, too.

        Returns:
            Always True.
        """
        with self._lock:
            if self._closed:
                publish(self._make_final())
                return True
        self._open()
        return True

    def _open(self) -> None:
        """Show the widgets in this cell. They are published here, because ipywidgets 7 loses the id of the display."""
        with self._lock:
            shown = self._make_picture()
            if self._panel is None:
                self._panel = Panel(self._stop)
                self._panel.show(shown)
            view = {"version_major": 2, "version_minor": 0, "model_id": self._panel.box.model_id}
            name = f"notebook-accel-{uuid.uuid4().hex}"
            self._shown.append(name)
            publish({"text/plain": page.render_text(shown), _WIDGET: view}, transient={"display_id": name})

    def _make_final(self) -> dict[str, str]:
        """Return what stays of the run in a saved notebook."""
        return page.make_bundle(keep_all(self._make_picture(lays=True), self._run.record))

    def _make_picture(self, *, lays: bool = False) -> Picture:
        """Return the run as it is now, with the metrics of ranks where the user has asked for them, or the caller."""
        picture, record = (
            make_picture(self._run, self._read_usage(), self._meter.history.read()),
            self._run.record,
        )
        chosen = None if self._panel is None else self._panel.laid
        if chosen is None and not lays:
            return picture
        laid = ranks.choose_laid(picture.measured, chosen or (), record.failed)
        return replace(picture, rank_metrics=ranks.read_metrics(record, laid))

    def _read_usage(self) -> Mapping[int, Usage]:
        run = self._run
        if not run.job.distributed or self._closed:
            return self._meter.read({})
        phases = list(run.record.phases.values())
        return self._meter.read(
            {phase.rank: phase.pid for phase in phases if phase.pid is not None}, run.job.holds
        )

    def _stop(self) -> None:
        """Handle a click on Stop. The first click lets workers finish, the second ends them."""
        self._run.request_stop(0.0 if self._run.stop_is_asked else GRACE)
        self._next = 0.0

    def _show_display(self, event: Display | ClearOutput) -> None:
        """Show a display of a worker in the cell, below the view."""
        output = self._run.job.output
        if output == "none" or (
            output == "first" and event.rank != min(self._run.record.phases.keys() - {-1})
        ):
            return
        if isinstance(output, str) or event.rank in output:
            if event.rank not in self._rank_displays:
                shown = output if not isinstance(output, str) else self._run.record.phases.keys() - {-1}
                named = output != "first" and len(set(shown)) > 1
                self._rank_displays[event.rank] = _RankDisplays(f"rank {event.rank}" if named else "")
            self._rank_displays[event.rank].take(event)


class _RankDisplays:
    """The displays of one rank in the cell.

    A rank that clears its output must not clear the cell, which has the view too. So its displays become empty, and the
    next displays of the rank use them again.

    Args:
        title: what stands above each of them; empty for nothing.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._ids: list[str] = []
        self._free: list[str] = []

    def take(self, event: Display | ClearOutput) -> None:
        if isinstance(event, ClearOutput):
            self._free, self._ids = self._ids + self._free, []
            if not event.wait:
                self._empty_free()
            return
        if event.update or event.transient.get("display_id"):
            if not event.update:
                self._show_title(self._title, "", update=False)
            publish(event.data, event.metadata, event.transient, update=event.update)
            return
        known = bool(self._free)
        name = self._free.pop(0) if known else f"notebook-accel-{id(self):x}-{len(self._ids)}"
        self._ids.append(name)
        self._show_title(self._title, name, update=known)
        publish(event.data, event.metadata, {"display_id": name}, update=known)
        self._empty_free()

    def _empty_free(self) -> None:
        for name in self._free:
            self._show_title("", name, update=True)
            publish({"text/plain": ""}, transient={"display_id": name}, update=True)

    def _show_title(self, title: str, name: str, *, update: bool) -> None:
        if self._title:
            html = {"text/html": page.render_title(title)} if title else {}
            transient = {"display_id": f"{name}-title"} if name else {}
            publish({"text/plain": title, **html}, transient=transient, update=update)
