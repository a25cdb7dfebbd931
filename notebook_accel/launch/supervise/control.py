"""How the holder of a run asks the engine, which may be in another thread, to stop it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ... import interrupts


class StopAsked(Exception):
    """The run was asked to stop."""


@dataclass(kw_only=True)
class Control:
    """What is asked of a run from outside; safe from any thread and from signal handlers.

    Attributes:
        grace: seconds that workers have to end by themselves, where they ask whether to stop.
        signum: the signal that ends this process, which the workers are to get at once; None where there is none.
    """

    grace: float = 0.0
    signum: int | None = None
    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _leave: threading.Event = field(default_factory=threading.Event, init=False)

    def stop(self, grace: float) -> None:
        """Ask the run to stop; a second call may shorten the grace.

        Args:
            grace: seconds that workers have to end by themselves.
        """
        self.grace = min(grace, self.grace) if self._stop.is_set() else grace
        self._stop.set()

    def end(self, signum: int) -> None:
        """Ask the run to end all workers at once.

        Args:
            signum: the signal that ends this process; the workers get it, too.
        """
        self.signum = signum
        self.stop(0.0)

    def leave(self) -> None:
        """Ask the engine to watch the run no more; for engines whose runs go on then."""
        self._leave.set()

    @property
    def is_left(self) -> bool:
        """Whether `leave` was called."""
        return self._leave.is_set()

    @property
    def stop_is_asked(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def check(self) -> None:
        """Raise StopAsked if `stop` was called, and obey an interrupt: for waits during which no worker runs."""
        interrupts.obey_interrupt()
        if self.stop_is_asked:
            raise StopAsked
