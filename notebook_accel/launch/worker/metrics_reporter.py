"""In a worker: sends metrics to the notebook, notes checkpoints, and answers whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...events import Metric, Save
from ...stopping import StopPoint
from ...stream.emit import Emitter


class WorkerReporter:
    """The way of code in the launched function to the notebook.

    Args:
        emitter: sends events.
        flush: returns when the notebook has this worker's output, or after a moment.
        stop_point: knows where the ranks are to stop.
    """

    def __init__(
        self,
        emitter: Emitter,
        flush: Callable[[], None],
        stop_point: StopPoint,
    ) -> None:
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

    def note_save(self, name: str, folders: Sequence[str], is_over: bool) -> None:
        """Report that a checkpoint is being written in the background; or that this is over, well or not.

        Args:
            name: the checkpoint's path.
            folders: what there is of it until it is whole.
            is_over: whether nothing is written any more.
        """
        emitter = self._emitter
        save = Save(rank=emitter.rank, time=emitter.now(), name=name, folders=tuple(folders), is_over=is_over)
        emitter.emit(save)

    def should_stop(self) -> bool:
        """Return whether the ranks of the launcher are to stop here."""
        return self._stop_point.reached()
