"""What code in the launched function can tell the notebook, besides its output: metrics."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping

from ..events import Metric
from ..stopping import StopPoint
from ..stream.emit import Emitter
from .control import Control
from .engines.base import Deliver
from .listener import pulse_of


class WorkerReporter:
    """Sends a worker's metrics as events."""

    def __init__(self, emitter: Emitter, flush: Callable[[], None], stop_point: StopPoint) -> None:
        self._emitter = emitter
        self._flush = flush
        self._stop_point = stop_point

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Send numbers of one step."""
        emitter = self._emitter
        emitter.emit(Metric(rank=emitter.rank, time=emitter.now(), values=values, step=step))

    def flush(self) -> None:
        """Return when the notebook has this worker's output, or after a moment."""
        self._flush()

    def should_stop(self) -> bool:
        """Return whether the ranks of this node are to stop here."""
        return self._stop_point.reached()


class CellReporter:
    """Takes the metrics of a function that runs in the notebook's own process."""

    def __init__(self, deliver: Deliver, control: Control) -> None:
        self._deliver = deliver
        self._control = control

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Take numbers of one step, and how far the training has come."""
        now = time.time()
        self._deliver([Metric(rank=0, time=now, values=values, step=step), pulse_of(0, now)])

    def flush(self) -> None:
        """Push out what Python holds back."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()

    def should_stop(self) -> bool:
        """Return whether somebody asked for it."""
        return self._control.stop_is_asked
