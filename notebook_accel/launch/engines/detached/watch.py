"""Shows a run that outlives its notebook, by what its driver writes; any number of processes may do so at once."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Final

from .... import interrupts
from ....errors import LaunchError, RunLeftError
from ....events import Event
from ....stream.record import RunRecord
from ....stream.wire import FrameError
from ...supervise.control import Control
from ...supervise.delivery import Deliver
from ...transfer import failures
from ..attempts import make_outcome
from ..base import Outcome
from .folder import Folder
from .recording import Alive, Left, Over

_READ_SECONDS: Final = 0.1
SILENT_SECONDS: Final = 60.0
"""After which a run that says nothing is told: six times as long as one is ever silent."""


class _EndRead(Exception):
    """Nothing more of the run can be read: it has told its end, or the rest is damaged."""


class Watch(ABC):
    """Shows a run from its beginning to its end, or until it is left.

    Args:
        folder: of the run.
        record: of the run.
        deliver: takes events.
        control: says when the run is to stop, or is left.
    """

    def __init__(self, folder: Folder, record: RunRecord, deliver: Deliver, control: Control) -> None:
        self._folder = folder
        self._reader = folder.make_reader()
        self._record, self._deliver, self._control = record, deliver, control
        self._heard = time.monotonic()
        self._said = 0.0  # when the last event was, by the clock of its node
        self._is_up_to_date = self._has_left = False
        self._over: Over | None = None
        self._damage = ""
        self._grace: float | None = None

    @abstractmethod
    def look(self) -> Outcome | None:
        """Look how the run stands, where there is nothing new to read; return the outcome of one that has ended."""

    @abstractmethod
    def pass_stop_on(self, grace: float) -> None:
        """Let the driver know that the run is to stop.

        Args:
            grace: seconds that the ranks have.
        """

    def insist(self) -> None:
        """Do what is due where the run was asked to stop and has not ended."""
        return

    def note_end(self, over: Over) -> None:
        """Note that the run has told its end."""
        return

    def note_begin(self) -> None:
        """Note that the driver has written for the first time."""
        return

    def run(self) -> Outcome:
        """Return how the run has ended.

        Raises:
            KeyboardInterrupt: the cell was interrupted; the run goes on.
        """
        try:
            self._folder.open()
            while True:
                has_come = self.pass_on()
                self._is_up_to_date |= not has_come
                self._check()
                if not has_come:
                    if (outcome := self.look()) is not None:
                        return outcome
                    self._folder.wait(_READ_SECONDS)
        except _EndRead:
            if self._over is None:
                return Outcome(error=LaunchError(self._damage))
            return self._make_outcome(self._over)
        except KeyboardInterrupt:
            self._control.leave()
            raise KeyboardInterrupt(self._folder.describe_left()) from None
        except RunLeftError as error:
            return Outcome(error=error)

    def pass_on(self) -> bool:
        """Show what the run has said next; return whether there was something."""
        had_begun = self._reader.has_begun
        try:
            events = self._reader.read_events()
        except FrameError as error:
            events = list(error.events)
            self._damage = f"what {self._folder.title} has written in {self._folder.path} is damaged: {error}"
        except LaunchError as error:
            events, self._damage = [], str(error)
        self._over = next((event for event in events if isinstance(event, Over)), None)
        self._deliver([event for event in events if not isinstance(event, (Alive, Left, Over))])
        if self._over is not None:
            self.note_end(self._over)
        if self._over is not None or self._damage:
            raise _EndRead
        if self._reader.has_begun and not had_begun:
            self.note_begin()
        if events:
            self._has_left = isinstance(events[-1], Left)
            self._heard = time.monotonic()
            self._said = max(self._said, *(event.time for event in events))
        return bool(events)

    def check_left(self) -> None:
        """Raise where the cell is interrupted, or the run is left."""
        interrupts.obey_interrupt()
        if self._control.is_left:
            raise RunLeftError(self._folder.describe_left())

    def _check(self) -> None:
        """Obey who interrupts, leaves or stops."""
        self.check_left()
        if not (self._control.stop_is_asked and self._is_up_to_date):  # else its end may be what comes next
            return
        if self._grace is None or self._control.grace < self._grace:
            self._grace = self._control.grace
            self.pass_stop_on(self._grace)
        else:
            self.insist()

    def say(self, *events: Event) -> None:
        """Show something that is not the run's own."""
        self._deliver(events)

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether somebody asked the run to stop, here or elsewhere."""
        return self._control.stop_is_asked or self._folder.read_stop() is not None

    def make_stopped_outcome(self, ended: float | None) -> Outcome:
        """Return the outcome of a run that was stopped and has not told its end.

        Args:
            ended: when, in seconds since the epoch.
        """
        ranks = frozenset(self._record.phases) - {-1}
        return Outcome(was_stopped=True, stopped=ranks, ended=ended)

    def _make_outcome(self, over: Over) -> Outcome:
        if over.error is not None:
            error = failures.revive(over.error, -1, 0)
            return Outcome(error=error, stopped=frozenset(over.stopped), ended=over.time)
        outcome = make_outcome(self._record, over.stopped, hang=over.hang, was_stopped=over.was_stopped)
        return replace(outcome, ended=over.time, was_asked=over.was_asked)
