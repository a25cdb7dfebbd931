"""How events of the workers get to the record and the cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...events import Event, Failure
from ...stream.record import RunRecord

Deliver = Callable[[Sequence[Event]], None]
"""Takes events as they come; also called with none, several times a second."""


class Delivery:
    """Passes events on, and knows what still counts once the workers are being stopped.

    From then on an error of a sink is ignored: it must not keep workers alive. If no rank had failed by then, the
    failures that follow are dropped: they come from the stop itself, such as an interrupt or a lost peer.

    Args:
        deliver: takes the events.
        record: holds what was delivered.

    Attributes:
        is_stopping: whether workers are being stopped.
    """

    def __init__(self, deliver: Deliver, record: RunRecord) -> None:
        self._deliver = deliver
        self._record = record
        self._drops_failures = False
        self.is_stopping = False

    def begin_to_stop(self) -> None:
        """Note that workers are being stopped from now on."""
        self.is_stopping = True
        self._drops_failures = self._drops_failures or not self._record.failures

    def has_outcome(self, rank: int) -> bool:
        """Return whether a rank has said how its function ended."""
        return rank in self._record.results or rank in self._record.failed

    def deliver(self, events: Sequence[Event]) -> None:
        """Pass events on.

        Args:
            events: in the order in which they came.

        Raises:
            Exception: a sink's own, unless workers are being stopped.
        """
        if self._drops_failures:
            events = [event for event in events if not isinstance(event, Failure)]
        try:
            self._deliver(events)
        except Exception:
            if not self.is_stopping:
                raise

    def report(self, failure: Failure) -> None:
        """Pass on a failure that this process found out; it counts also while workers are being stopped."""
        self._deliver([failure])
