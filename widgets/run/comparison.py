"""Runs beside each other: a table of them, and a chart for each metric with a line for each run."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, SupportsIndex, overload

from notebook_accel.launch.durations import format_duration
from notebook_accel.launch.run import Run

from . import chart
from .labels import format_short
from .lines import WRONG, render_fold
from .page import embed_chart, find_steep
from .table import CELL, SIGNS, join_table

_COLUMNS: Final = ("run", "function", "processes", "status", "time", "steps")
_MAX_COLUMNS: Final = 6  # of metrics besides


class RunList(list[Run]):
    """Runs, oldest first. As the value of a cell a notebook shows them compared; a part of them too."""

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> Run: ...
    @overload
    def __getitem__(self, place: slice, /) -> RunList: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> Run | RunList:
        found = super().__getitem__(place)
        return RunList(found) if isinstance(found, list) else found

    def find(self, number: int) -> Run:
        """Return the run of a number, which stays the same while runs come and go.

        Args:
            number: as the compared runs show it, and `Run.number`.

        Raises:
            ValueError: the list has no such run.
        """
        for run in self:
            if run.number == number:
                return run
        numbers = ", ".join(str(run.number) for run in self)
        raise ValueError(f"run {number} is not in the list: it has {numbers or 'none'}")

    def _repr_html_(self) -> str | None:
        return render_comparison(self) or None


def render_comparison(runs: Sequence[Run]) -> str:
    """Return a table of runs and their metrics in common charts, as HTML without scripts; empty without a run.

    Args:
        runs: each is named by its number, and has the colour of that.
    """
    if not runs:
        return ""
    compared = {str(run.number): _read(run) for run in runs}
    panels = chart.compare_panels(compared)
    words = f"metrics of {len(runs)} runs"
    parts = [_render_table(runs, compared), embed_chart(panels, words), _render_rest(compared, panels)]
    steep = {name: replace(run, metrics=find_steep(run.metrics)) for name, run in compared.items()}
    if logarithmic := chart.compare_panels(steep, log=True):
        drawn = embed_chart(logarithmic, words, log=True)
        parts.append(render_fold("logarithmic", drawn))
    return f'<div class="accel-runs" style="line-height:1.4;max-width:64em">{"".join(parts)}</div>'


def _read(run: Run) -> chart.Compared:
    """Return what a run has logged so far; it may be logging on."""
    metrics = {name: list(series) for name, series in list(run.record.metrics.items())}
    found = {name: points for name, points in metrics.items() if points}
    return chart.Compared(found, run.started, chart.choose_colour(run.number - 1))


def _render_rest(compared: dict[str, chart.Compared], panels: Sequence[chart.Panel]) -> str:
    """Return how many metrics neither the table nor a chart has, as HTML; empty where they have all."""
    logged = {metric for run in compared.values() for metric in run.metrics}
    rest = logged - {*_choose_metrics(compared), *(panel.title for panel in panels)}
    if not rest:
        return ""
    number = "1 more metric" if len(rest) == 1 else f"{len(rest):,} more metrics"
    return f'<div style="opacity:0.8">and {number}, in <code>metrics</code> of each run</div>'


def _choose_metrics(compared: dict[str, chart.Compared]) -> list[str]:
    """Return the metrics that have a column in the table."""
    metrics = dict.fromkeys(metric for run in compared.values() for metric in run.metrics)
    return [name for name in metrics if name not in _COLUMNS][:_MAX_COLUMNS]


def _render_table(runs: Sequence[Run], compared: dict[str, chart.Compared]) -> str:
    shown = _choose_metrics(compared)
    columns = [*(name for name in _COLUMNS if name != "steps" or any(run.steps for run in runs)), *shown]
    rows = "".join(_render_row(run, compared[str(run.number)], columns) for run in runs)
    return join_table("Runs", columns, rows)


def _render_row(run: Run, compared: chart.Compared, columns: Sequence[str]) -> str:
    cells = {name: format_short(points[-1].value) for name, points in compared.metrics.items()} | {
        "run": f'<span style="color:{compared.colour}">━</span> <b>{run.number}</b>',
        "function": html.escape(run.job.name),
        "processes": str(run.job.local_world_size),
        "status": f"{SIGNS[run.status]} {run.status}",
        "time": format_duration(run.seconds if run.is_over else float(int(run.seconds))),
        "steps": f"{run.steps:,}" if run.steps else "",
    }
    wrong = {"status": f";color:{WRONG}"} if run.status == "failed" else {}
    texts = [f'<td style="{CELL}{wrong.get(name, "")}">{cells.get(name, "")}</td>' for name in columns]
    return f"<tr>{''.join(texts)}</tr>"
