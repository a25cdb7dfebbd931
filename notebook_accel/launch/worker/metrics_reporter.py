"""In a worker: sends metrics to the notebook, notes checkpoints, and answers whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Final

from ...events import Metric, Save
from ...stopping import StopPoint
from ...stream.emit import Emitter
from ...stream.series import MOST_MEASURED
from ...topology import Topology

_MOST_AT_ONCE: Final = 500  # rows of the same names: a chart draws as many
_MOST_KINDS: Final = 100  # of rows, by their names; all others count as one
_PAUSE_SECONDS: Final = 0.1  # between two rows that come after these


class WorkerReporter:
    """The way of code in the launched function to the notebook.

    The first rank of a launcher sends all metrics. Others send what the notebook can take: from up to `MOST_MEASURED`
    ranks, and from each of these some rows a second.

    Args:
        emitter: sends events.
        flush: returns when the notebook has this worker's output, or after a moment.
        stop_point: knows where the ranks are to stop.
        topology: the place of this rank.
        has_all_nodes: whether one launcher has the ranks of all nodes.
    """

    def __init__(
        self,
        emitter: Emitter,
        flush: Callable[[], None],
        stop_point: StopPoint,
        topology: Topology,
        *,
        has_all_nodes: bool = False,
    ) -> None:
        self._emitter = emitter
        self._flush = flush
        self._stop_point = stop_point
        place, count = topology.local_rank, topology.local_world_size
        if has_all_nodes:
            place, count = topology.rank, topology.world_size
        self._sends_some = place % -(-count // MOST_MEASURED) == 0
        self._sends_all = place == 0
        self._sent: dict[tuple[str, ...], tuple[int, float]] = {}  # how many rows, and when the last

    def takes_metrics(self, names: Iterable[str]) -> bool:
        """Return whether the numbers of one more step are sent; an evaluation's are, however fast the losses come.

        Args:
            names: of the values.
        """
        if self._sends_all or not self._sends_some:
            return self._sends_all
        kind, now = tuple(map(str, names)), monotonic()
        if kind not in self._sent and len(self._sent) >= _MOST_KINDS:
            kind = ()
        count, last = self._sent.get(kind, (0, 0.0))
        if count >= _MOST_AT_ONCE and now - last < _PAUSE_SECONDS:
            return False
        self._sent[kind] = count + 1, now
        return True

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Send numbers of one step, for which `takes_metrics` was asked.

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
