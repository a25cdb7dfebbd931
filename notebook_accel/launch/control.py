"""How whoever holds a run tells the engine, which may be in another thread, to stop it."""

from __future__ import annotations

import threading


class StopAsked(Exception):
    """The run was asked to stop."""


class Control:
    """What is asked of a run from outside; safe from any thread and from signal handlers.

    Attributes:
        grace: seconds that workers have to end of themselves, where they ask whether to stop.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.grace = 0.0

    def stop(self, grace: float) -> None:
        """Ask the run to stop; a second call may shorten the grace."""
        self.grace = min(grace, self.grace) if self._stop.is_set() else grace
        self._stop.set()

    @property
    def stop_is_asked(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def check(self) -> None:
        """Raise StopAsked if `stop` was called: for waits during which no worker runs."""
        if self.stop_is_asked:
            raise StopAsked
