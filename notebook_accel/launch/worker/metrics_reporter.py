"""In a worker: sends metrics to the notebook, and answers whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...events import Metric
from ...stopping import StopPoint
from ...stream.emit import Emitter


class WorkerReporter:
    """The way of code in the launched function to the notebook.

    Args:
        emitter: sends events.
        flush: returns when the notebook has this worker's output, or after a moment.
        stop_point: knows where the ranks are to stop.
    """

    def __init__(self, emitter: Emitter, flush: Callable[[], None], stop_point: StopPoint) -> None:
        self._emitter = emitter
        self._flush = flush
        self._stop_point = stop_point

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Send numbers of one step.

        Args:
            values: numbers by name.
            step: the step; None where there is no number for it.
        """
        emitter = self._emitter
        emitter.emit(Metric(rank=emitter.rank, time=emitter.now(), values=values, step=step))

    def flush(self) -> None:
        """Return when the notebook has this worker's output, or after a moment."""
        self._flush()

    def should_stop(self) -> bool:
        """Return whether the ranks of this node are to stop here."""
        return self._stop_point.reached()
