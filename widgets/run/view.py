"""RunView: a run as a live view of widgets in the cell, and as a static page afterwards."""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Final

from notebook_accel.events import ClearOutput, Display, Event, Phase
from notebook_accel.launch.run import GRACE, Run
from notebook_accel.stream.sinks import Sink, publish

from . import page
from .panel import Panel
from .picture import Picture, Usage, picture
from .usage import Meter

INTERVAL: Final = 0.2
_WIDGET: Final = "application/vnd.jupyter.widget-view+json"
_SHARE: Final = 0.05  # of the time that drawing may take


class RunView(Sink):
    """Draws a run, five times a second at most.

    All copies of the view show the same widgets; at the end each becomes a static page through its own display.

    Args:
        run: what to draw.
        at_once: False waits until the run has told something of itself, for a function of this process, whose output
            is the cell's own.
    """

    def __init__(self, run: Run, *, at_once: bool = True) -> None:
        self._run = run
        self._panel: Panel | None = None
        self._shown: list[str] = []
        self._meter = Meter()
        self._passed: dict[int, _Passed] = {}
        self._next = 0.0
        self._closed = False
        self._broken = False
        self._lock = threading.Lock()
        if at_once:
            self._open()

    def show(self, events: Sequence[Event]) -> None:
        """Draw the run, where it is time to; a view that breaks says so once and draws no more."""
        if not self._run.job.background:
            for event in events:
                if isinstance(event, (Display, ClearOutput)):
                    self._pass_on(event)
        if self._broken:
            return
        try:
            if self._panel is None and any(not isinstance(event, Phase) for event in events):
                self._open()
            now = time.monotonic()
            if self._panel is not None and now >= self._next:
                with self._lock:
                    self._panel.show(self._picture())
                self._next = now + max(INTERVAL, (time.monotonic() - now) / _SHARE)
        except Exception as error:
            self._broken = True
            print(f"notebook_accel: the view of {self._run.job.name} is broken: {error!r}", file=sys.stderr)

    def note(self, text: str) -> None:
        """Print a message of the launcher itself; the view has it in its own words."""
        if not self._run.job.background:
            print(f"notebook_accel: {text}", file=sys.stderr)

    def close(self) -> None:
        """Make every copy a static page."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._panel is not None:
                final = page.bundle(self._picture())
                self._panel.end(final["text/html"])
                for name in self._shown:
                    publish(final, transient={"display_id": name}, update=True)
                self._shown.clear()
            self._meter.close()

    def again(self) -> bool:
        """Show the view in the cell that runs now."""
        with self._lock:
            if self._closed:
                publish(page.bundle(self._picture()))
                return True
        self._open()
        return True

    def _open(self) -> None:
        """Show the widgets; by hand, since ipywidgets 7 loses the name of the display."""
        with self._lock:
            shown = self._picture()
            if self._panel is None:
                self._panel = Panel(self._stop)
                self._panel.show(shown)
            view = {"version_major": 2, "version_minor": 0, "model_id": self._panel.box.model_id}
            name = f"notebook-accel-{uuid.uuid4().hex}"
            self._shown.append(name)
            publish({"text/plain": page.plain(shown), _WIDGET: view}, transient={"display_id": name})

    def _picture(self) -> Picture:
        return picture(self._run, self._usage())

    def _usage(self) -> Mapping[int, Usage]:
        run = self._run
        if not run.job.distributed or self._closed:
            return self._meter.read({})
        phases = list(run.record.phases.values())
        return self._meter.read(
            {phase.rank: phase.pid for phase in phases if phase.pid is not None}, run.job.holds
        )

    def _stop(self) -> None:
        """Take a click: the first lets workers finish, the second ends them."""
        self._run.request_stop(0.0 if self._run.stop_is_asked else GRACE)
        self._next = 0.0

    def _pass_on(self, event: Display | ClearOutput) -> None:
        """Show in the cell, below the view, what a worker displays."""
        output = self._run.job.output
        if output == "none" or (
            output == "first" and event.rank != min(self._run.record.phases.keys() - {-1})
        ):
            return
        if isinstance(output, str) or event.rank in output:
            self._passed.setdefault(event.rank, _Passed()).take(event)


class _Passed:
    """The displays of one rank in the cell; those that it clears are used again, since the cell has the view, too."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._free: list[str] = []

    def take(self, event: Display | ClearOutput) -> None:
        if isinstance(event, ClearOutput):
            self._free, self._ids = self._ids + self._free, []
            if not event.wait:
                self._blank()
            return
        if event.update or event.transient.get("display_id"):
            publish(event.data, event.metadata, event.transient, update=event.update)
            return
        known = bool(self._free)
        name = self._free.pop(0) if known else f"notebook-accel-{id(self):x}-{len(self._ids)}"
        self._ids.append(name)
        publish(event.data, event.metadata, {"display_id": name}, update=known)
        self._blank()

    def _blank(self) -> None:
        for name in self._free:
            publish({"text/plain": ""}, transient={"display_id": name}, update=True)
