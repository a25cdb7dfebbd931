"""What the drivers of runs that outlive their notebook share."""

from __future__ import annotations

import time
from typing import Any

from ...supervise.control import Control
from ...transfer import failures
from ..base import Outcome
from .folder import Folder
from .recording import Over


class StopWatch:
    """Passes on to the run that somebody asked it to stop.

    Args:
        folder: of the run.
        control: of the run.
        seconds: between two looks into the folder.
        grace: seconds that ranks have where a signal came and the folder does not say it yet.
    """

    def __init__(self, folder: Folder, control: Control, seconds: float, grace: float = 0.0) -> None:
        self._folder, self._control = folder, control
        self._seconds, self._default = seconds, grace
        self._signals = 0
        self._grace: float | None = None
        self._looked = time.monotonic()

    def note_signal(self, signum: int, frame: Any) -> None:
        """Look at once: somebody has just asked."""
        self._signals += 1

    def look(self) -> None:
        """Look whether somebody asked."""
        now = time.monotonic()
        if not self._signals and now - self._looked < self._seconds:
            return
        grace = self._folder.read_stop()
        if grace is None and self._signals:  # it is not seen here yet
            grace = self._default
        self._signals, self._looked = 0, now
        if grace is not None and (self._grace is None or grace < self._grace):
            self._grace = grace
            self._control.stop(grace)


def make_over(outcome: Outcome, control: Control) -> Over:
    """Return what is written of how a run has ended.

    Args:
        outcome: of the run.
        control: of the run.
    """
    return Over(
        rank=-1,
        time=time.time(),
        stopped=sorted(outcome.stopped),
        was_stopped=outcome.was_stopped,
        was_asked=control.stop_is_asked,
        hang=outcome.hang,
        error=None if outcome.error is None else failures.describe(outcome.error),
    )
