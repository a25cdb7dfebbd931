"""Metrics of ranks laid over each other: which ranks, what is read of them, and their charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from notebook_accel.stream.record import RunRecord
from notebook_accel.stream.series import Point

from . import chart
from .picture import Picture

MOST_LAID: Final = 8
"""As many ranks have a colour of their own."""
POINTS: Final = 120
"""Of each line: a saved notebook has them all."""

RankMetrics = Mapping[int, Mapping[str, Sequence[Point]]]


def choose_laid(measured: Sequence[int], chosen: Iterable[int], failed: Iterable[int] = ()) -> list[int]:
    """Return the ranks whose metrics are laid over each other, in order.

    Args:
        measured: the ranks that have metrics.
        chosen: by the user, of whom the first `MOST_LAID` are taken; without one those that failed, and the first.
        failed: ranks that failed.
    """
    wanted, bad = set(chosen), set(failed)
    found = [rank for rank in measured if rank in wanted]
    if not found:
        found = sorted(measured, key=lambda rank: (rank not in bad, rank))
    return sorted(found[:MOST_LAID])


def read_metrics(record: RunRecord, ranks: Iterable[int]) -> RankMetrics:
    """Return the points of each metric of ranks, as they are now.

    Args:
        record: of the run.
        ranks: which.
    """
    return {
        rank: {name: tuple(series) for name, series in list(record.find_metrics(rank).items())}
        for rank in ranks
    }


def make_panels(picture: Picture, *, log: bool = False) -> list[chart.Panel]:
    """Return a panel for each metric, with a line for each rank.

    Args:
        picture: the run.
        log: whether only values above 0 can be drawn.
    """
    lines = {
        f"rank {rank}": chart.Compared(metrics, picture.started)
        for rank, metrics in picture.rank_metrics.items()
    }
    return chart.compare_panels(lines, log=log, limit=POINTS)


def render_legend(picture: Picture) -> str:
    """Return which colour is which rank, as HTML.

    Args:
        picture: the run.
    """
    entries = [
        f'<span style="white-space:nowrap"><span style="color:{chart.choose_colour(number)}">━</span> {rank}</span>'
        for number, rank in enumerate(picture.rank_metrics)
    ]
    more = len(picture.measured) - len(entries)
    rest = f" of {len(picture.measured)}" if more else ""
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:0 1em"><span>ranks</span>{"".join(entries)}{rest}</div>'
    )


def are_alike(metrics: RankMetrics) -> bool:
    """Return whether all ranks have logged the same, as after a gather: then one line hides all others.

    Args:
        metrics: the points of each rank. One that has no metric of a name is left out of that.
    """
    first: dict[str, dict[object, float]] = {}
    for own in metrics.values():
        for name, points in own.items():
            known = first.setdefault(name, {})
            for number, point in enumerate(points):
                place = ("without a step", number) if point.step is None else point.step
                value = known.setdefault(place, point.value)
                if value != point.value and not (math.isnan(value) and math.isnan(point.value)):
                    return False
    return True
