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

_MOST_AT_ONCE: Final = 500  # rows: a chart draws as many
_ROWS_PER_SECOND: Final = 10.0
_MOST_KINDS: Final = 100  # of rows, by their names


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
        self._sends_some = place % choose_stride(count) == 0
        self._sends_all = place == 0
        self._allowances: dict[tuple[str, ...], Allowance] = {}

    def takes_metrics(self, names: Iterable[str]) -> bool:
        """Return whether the numbers of one more step are sent.

        Args:
            names: of the values.
        """
        return self._sends_all or (self._sends_some and self._may_send(tuple(map(str, names))))

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Send numbers of one step, for which `takes_metrics` was asked.

        Args:
            values: numbers by name.
            step: the step; None where there is no number for it.
        """
        emitter = self._emitter
        emitter.emit(Metric(rank=emitter.rank, time=emitter.now(), values=values, step=step))

    def _may_send(self, names: tuple[str, ...]) -> bool:
        """Return whether a row is due; an evaluation is, however fast the losses come."""
        known = names if names in self._allowances or len(self._allowances) < _MOST_KINDS else ()
        if known not in self._allowances:
            self._allowances[known] = Allowance(_MOST_AT_ONCE, _ROWS_PER_SECOND)
        return self._allowances[known].take(monotonic())

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


class Allowance:
    """Lets so much pass at once, and then so much a second.

    Args:
        most: at once.
        rate: a second.
    """

    def __init__(self, most: int, rate: float) -> None:
        self._most, self._rate = most, rate
        self._left, self._looked = float(most), 0.0

    def take(self, now: float) -> bool:
        """Return whether one more may pass.

        Args:
            now: in seconds, by a clock that never goes back.
        """
        self._left = min(self._most, self._left + self._rate * (now - self._looked))
        self._looked = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def choose_stride(count: int) -> int:
    """Return of how many ranks one sends metrics: a power of two, so that `MOST_MEASURED` ranks do at most.

    Args:
        count: the ranks of a launcher.
    """
    stride = 1
    while count > stride * MOST_MEASURED:
        stride *= 2
    return stride
