"""Panel: the widgets of a live view."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import ipywidgets

from . import lines, page, table
from .figures import Figures, close_whole
from .picture import Output, Picture

_CHART_SECONDS: Final = 1.0
_HIDDEN_SECONDS: Final = 1.0
# The element of the widget itself scrolls, because it stays when the text inside it changes. With the reversed
# direction it shows the newest line. If the user has scrolled up, it keeps that distance from the newest line.
_STYLE: Final = """<style>
.accel-run { max-width: 64em; }
.accel-run .widget-html-content { line-height: 1.4; }
.accel-run .widget-html { overflow: visible; }
.accel-run .accel-run-lines.widget-html { display: flex; flex-direction: column-reverse; align-items: stretch;
  max-height: 18em; height: auto; overflow: auto; margin: 0; }
.accel-run .accel-run-lines > .widget-html-content { flex: 0 0 auto; width: 100%; }
.accel-run .accel-run-head { align-items: center; flex-wrap: wrap; overflow: visible; gap: 8px; }
.accel-run .accel-run-choices { gap: 16px; }
</style>"""


class Panel:
    """Shows the newest picture of a run, and changes only the widgets that differ from the last one.

    Args:
        stop: called when the user clicks Stop. ipykernel may call it in another thread.

    Attributes:
        box: the widget that holds all others.
        status: the widget with the status of the run.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop_run = stop
        self._lines: dict[int, Any] = {}
        self._states: dict[int, object] = {}
        self._titles: dict[int, str] = {}
        self._next_chart = self._next_hidden = 0.0
        self._chart_state: object = None
        self.status, self._head = _html(), _html()
        self._stop = ipywidgets.Button(
            description="Stop",
            tooltip="Let the workers finish a step and save; a second click ends them",
            icon="stop",
        )
        self._stop.layout.width = "8em"
        self._stop.on_click(self._on_stop)
        self._table, self._notice, self._bars, self._chart, self._usage = (_html() for _ in range(5))
        self._failure, self._figures = _html(), Figures()
        self._log = ipywidgets.Checkbox(description="log scale", indent=False)
        self._every = ipywidgets.Checkbox(description="all ranks", indent=False)
        self._load = ipywidgets.Checkbox(description="memory and load", indent=False)
        for box in (self._log, self._every, self._load):
            box.layout.width = "auto"
            box.observe(self._on_choice, names="value")
        self._choices, self._tabs = ipywidgets.HBox(), ipywidgets.Tab()
        self._choices.add_class("accel-run-choices")
        self._upper = ipywidgets.HBox([self.status, self._head, self._stop])
        self._upper.add_class("accel-run-head")
        self.box = ipywidgets.VBox([_html(_STYLE), self._upper])
        self.box.add_class("accel-run")
        _handle_clicks_during_cells(self._stop, self._log, self._every, self._load, self._tabs)

    def show(self, picture: Picture) -> None:
        """Show a picture. The chart and hidden tabs change at most once a second.

        Args:
            picture: the run as it is now.
        """
        now = time.monotonic()
        _set(self.status, "value", f'<b role="status">{page.describe_status(picture)}</b>')
        _set(self._head, "value", page.render_headline(picture))
        _set(self._stop, "description", "Stop now" if picture.stopping else "Stop")
        if picture.distributed:
            _set(self._table, "value", table.render_table(picture, every_rank=self._every.value))
        _set(self._notice, "value", page.render_notice(picture))
        _set(self._bars, "value", page.render_bars(picture, every_rank=self._every.value))
        if now >= self._next_chart:
            self._next_chart = now + _CHART_SECONDS
            self._show_chart(picture)
            _set(self._usage, "value", page.render_usage(picture) if self._load.value else "")
        for rank, output in picture.outputs.items():
            if output.rows and picture.distributed:
                self._show_lines(rank, output, now)
        if now >= self._next_hidden:
            self._next_hidden = now + _HIDDEN_SECONDS
        _set(
            self._failure,
            "value",
            page.render_failure(picture.failure) if picture.failure is not None else "",
        )
        if picture.background:
            self._figures.show(picture.displays)
        self._arrange(picture)

    def end(self, html: str) -> None:
        """Show the static page in place of the widgets, and close these.

        Args:
            html: the static page.
        """
        final = _html(html)
        parts = [
            *self.box.children,
            *self._upper.children,
            self._table,
            self._notice,
            self._bars,
            self._chart,
            self._usage,
        ]
        parts += [self._failure, self._log, self._every, self._load, self._choices]
        parts += [self._tabs, *self._lines.values()]
        self.box.children = (final,)
        self._figures.close()
        for part in dict.fromkeys(parts):
            if part is not self._figures.box:
                close_whole(part)

    def _arrange(self, picture: Picture) -> None:
        """Show the widgets that have content, in their order."""
        has_more = len(picture.bars) > 1 or len(picture.ranks) > table.MOST_ROWS
        parts: list[Any] = [self.box.children[0], self._upper, self._table]
        parts += [self._notice] if self._notice.value else []
        parts += [self._bars] if self._bars.value else []
        parts += [self._every] if has_more else []
        choices = [*([self._log] if self._chart.value else []), *([self._load] if picture.history else [])]
        _set(self._choices, "children", tuple(choices))
        parts += [self._chart] if self._chart.value else []
        parts += [self._choices] if choices else []
        parts += [self._usage] if self._usage.value else []
        parts += [self._tabs] if self._lines else []
        parts += [self._figures.box] if self._figures.box.children else []
        parts += [self._failure] if self._failure.value else []
        _set(self.box, "children", tuple(parts))
        upper = (self.status, self._head, *([self._stop] if picture.distributed else []))
        _set(self._upper, "children", upper)

    def _show_chart(self, picture: Picture) -> None:
        state = (
            self._log.value,
            [(name, len(points), points[-1]) for name, points in picture.metrics.items()],
        )
        if state != self._chart_state:
            self._chart_state = state
            _set(self._chart, "value", page.render_chart(picture, log=self._log.value))

    def _show_lines(self, rank: int, output: Output, now: float) -> None:
        if rank not in self._lines:
            self._add_tab(rank)
        hidden = self._tabs.selected_index != list(self._lines).index(rank)
        state = (output.total, [event.text for event in output.unfinished])
        if self._states.get(rank) == state or (hidden and now < self._next_hidden):
            return
        self._states[rank] = state
        _set(self._lines[rank], "value", lines.render_lines(rank, output))
        title = f"rank {rank} ✗" if lines.has_errors(output) else f"rank {rank}"
        if self._titles.get(rank) != title:
            self._titles[rank] = title
            self._tabs.set_title(list(self._lines).index(rank), title)

    def _add_tab(self, rank: int) -> None:
        pane = _html()
        pane.add_class("accel-run-lines")
        if pane.has_trait("tabbable"):  # since ipywidgets 8: lets the keyboard scroll it
            pane.tabbable = True
        self._lines[rank] = pane
        self._lines = dict(sorted(self._lines.items()))
        self._tabs.children = tuple(self._lines.values())
        if self._tabs.selected_index is None:
            self._tabs.selected_index = 0
        self._titles.clear()
        for number, known in enumerate(self._lines):
            self._tabs.set_title(number, f"rank {known}")

    def _on_stop(self, _: Any) -> None:
        self._stop_run()

    def _on_choice(self, _: Any) -> None:
        self._next_chart = 0.0


def _html(value: str = "") -> Any:
    return ipywidgets.HTML(value)


def _set(widget: Any, name: str, value: Any) -> None:
    """Change a trait only if its value differs, because the browser redraws it after every change."""
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def _handle_clicks_during_cells(*widgets: Any) -> None:
    """Let clicks be handled while a cell runs, if the front end sends them to a thread of their own (a subshell).

    ipykernel 7.4 would send them back to the thread that made the widget, which is busy with the cell.
    """
    for widget in widgets:
        comm: Any = getattr(widget, "comm", None)
        if hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = None
