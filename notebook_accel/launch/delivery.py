"""What comes from the ranks of an attempt, on its way to the record and the cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..events import Event, Failure
from ..stream.record import RunRecord


class Delivery:
    """Passes events on.

    Once ranks are being stopped, an output that cannot be shown stops nothing; where none had failed before that, what
    they raise then is no failure: a peer that has gone, or the interrupt.

    Args:
        deliver: takes the events.
        record: holds what was delivered.
    """

    def __init__(self, deliver: Callable[[Sequence[Event]], None], record: RunRecord) -> None:
        self._deliver = deliver
        self._record = record
        self._was_asked = False
        self.is_stopping = False

    def begin_to_stop(self) -> None:
        """Note that ranks are being stopped from now on."""
        self.is_stopping = True
        self._was_asked = self._was_asked or not self._record.failures

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank has said how its function ended."""
        return rank in self._record.results or any(failure.rank == rank for failure in self._record.failures)

    def __call__(self, events: Sequence[Event]) -> None:
        """Deliver events."""
        if self._was_asked:
            events = [event for event in events if not isinstance(event, Failure)]
        try:
            self._deliver(events)
        except Exception:
            if not self.is_stopping:
                raise

    def tell(self, failure: Failure) -> None:
        """Deliver a failure that was found out on this side; it counts also while ranks are being stopped."""
        self._deliver([failure])
