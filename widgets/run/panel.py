"""Panel: the widgets of a live view."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import ipywidgets

from notebook_accel.stream.sinks import escape_surrogates

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


_CHOICES: Final = {"every": "all ranks", "log": "log scale", "load": "memory and load"}
"""What the user may choose, by the name of its part."""


class Panel:
    """Shows the newest picture of a run, and changes only the widgets that differ from the last one.

    A part is made when it has something to show, and texts share layout and style: each of these is a message to the
    browser, and the first launch waits for those of the first picture.

    Args:
        stop: called when the user clicks Stop. ipykernel may call it in another thread.

    Attributes:
        box: the widget that holds all others.
        status: the widget with the status of the run.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop_run = stop
        self._parts: dict[str, Any] = {}  # by name: texts, choices, and what holds them
        self._lines: dict[int, Any] = {}
        self._states: dict[int, object] = {}
        self._titles: dict[int, str] = {}
        self._next_chart = self._next_hidden = 0.0
        self._chart_state: object = None
        self._figures: Figures | None = None
        self.status = ipywidgets.HTML()
        self._head = self._make_text()
        self._stop = ipywidgets.Button(
            description="Stop",
            tooltip="Let the workers finish a step and save; a second click ends them",
            icon="stop",
        )
        self._stop.layout.width = "8em"
        self._stop.on_click(self._on_stop)
        self._upper = ipywidgets.HBox([self.status, self._head, self._stop], layout=self.status.layout)
        self._upper.add_class("accel-run-head")
        self.box = ipywidgets.VBox([self._make_text(_STYLE), self._upper])
        self.box.add_class("accel-run")
        _handle_clicks_during_cells(self._stop)

    def show(self, picture: Picture) -> None:
        """Show a picture. The chart and hidden tabs change at most once a second.

        Args:
            picture: the run as it is now.
        """
        now = time.monotonic()
        _set(self.status, "value", f'<b role="status">{page.describe_status(picture)}</b>')
        _set(self._head, "value", page.render_headline(picture))
        _set(self._stop, "description", "Stop now" if picture.stopping else "Stop")
        every = self._is_chosen("every")
        if picture.distributed:
            self._show_text("table", table.render_table(picture, every_rank=every))
        self._show_text("notice", page.render_notice(picture))
        self._show_text("bars", page.render_bars(picture, every_rank=every))
        if now >= self._next_chart:
            self._next_chart = now + _CHART_SECONDS
            self._show_chart(picture)
            self._show_text("usage", page.render_usage(picture) if self._is_chosen("load") else "")
        for rank, output in picture.outputs.items():
            if output.rows and picture.distributed:
                self._show_lines(rank, output, now)
        self._show_text("hidden", page.render_hidden_outputs(picture) if self._lines else "")
        if now >= self._next_hidden:
            self._next_hidden = now + _HIDDEN_SECONDS
        self._show_text(
            "failure", page.render_failure(picture.failure) if picture.failure is not None else ""
        )
        if picture.background and (picture.displays or self._figures is not None):
            self._figures = self._figures or Figures()
            self._figures.show(picture.displays)
        self._arrange(picture)

    def end(self, html: str) -> None:
        """Show the static page in place of the widgets, and close these.

        Args:
            html: the static page.
        """
        parts = [*self.box.children, *self._upper.children, *self._parts.values(), *self._lines.values()]
        self.box.children = (ipywidgets.HTML(escape_surrogates(html)),)
        if self._figures is not None:
            self._figures.close()
        for part in dict.fromkeys(parts):
            if self._figures is None or part is not self._figures.box:
                close_whole(part)

    def _arrange(self, picture: Picture) -> None:
        """Show the widgets that have content, in their order."""
        has_more = len(picture.bars) > 1 or len(picture.ranks) > table.MOST_ROWS
        has_more = has_more and len(picture.ranks) <= table.MOST_SINGLE
        chart = self._find_filled("chart")
        choices = (["log"] if chart else []) + (["load"] if picture.history else [])
        parts: list[Any] = [self.box.children[0], self._upper, *self._find_filled("table", "notice", "bars")]
        parts += [self._make_choice("every")] if has_more else []
        parts += chart
        if choices:
            parts.append(self._make_part("choices", ipywidgets.HBox, "accel-run-choices"))
            _set(parts[-1], "children", tuple(map(self._make_choice, choices)))
        parts += self._find_filled("usage")
        parts += [self._parts["tabs"], *self._find_filled("hidden")] if self._lines else []
        parts += [self._figures.box] if self._figures is not None and self._figures.box.children else []
        parts += self._find_filled("failure")
        _set(self.box, "children", tuple(parts))
        upper = (self.status, self._head, *([self._stop] if picture.distributed else []))
        _set(self._upper, "children", upper)

    # -- parts

    def _make_text(self, value: str = "") -> Any:
        return ipywidgets.HTML(value, layout=self.status.layout, style=self.status.style)

    def _show_text(self, name: str, value: str) -> None:
        if value and name not in self._parts:
            self._parts[name] = self._make_text()
        if name in self._parts:
            _set(self._parts[name], "value", value)

    def _find_filled(self, *names: str) -> list[Any]:
        """Return the texts of these names that are not empty."""
        return [self._parts[name] for name in names if name in self._parts and self._parts[name].value]

    def _make_part(self, name: str, kind: Callable[[], Any], css_class: str = "") -> Any:
        """Return the part of a name, made where there is none yet."""
        if name not in self._parts:
            self._parts[name] = kind()
            if css_class:
                self._parts[name].add_class(css_class)
            _handle_clicks_during_cells(self._parts[name])
        return self._parts[name]

    def _make_choice(self, name: str) -> Any:
        if name not in self._parts:
            box = self._make_part(name, lambda: ipywidgets.Checkbox(description=_CHOICES[name], indent=False))
            box.layout.width = "auto"
            box.observe(self._on_choice, names="value")
        return self._parts[name]

    def _is_chosen(self, name: str) -> bool:
        return name in self._parts and bool(self._parts[name].value)

    def _show_chart(self, picture: Picture) -> None:
        state = (
            self._is_chosen("log"),
            [(name, len(points), points[-1]) for name, points in picture.metrics.items()],
        )
        if state != self._chart_state:
            self._chart_state = state
            self._show_text("chart", page.render_chart(picture, log=self._is_chosen("log")))

    def _show_lines(self, rank: int, output: Output, now: float) -> None:
        if rank not in self._lines:
            self._add_tab(rank)
        tabs = self._parts["tabs"]
        hidden = tabs.selected_index != list(self._lines).index(rank)
        state = (output.total, [event.text for event in output.unfinished])
        if self._states.get(rank) == state or (hidden and now < self._next_hidden):
            return
        self._states[rank] = state
        _set(self._lines[rank], "value", lines.render_lines(rank, output))
        title = f"rank {rank} ✗" if lines.has_errors(output) else f"rank {rank}"
        if self._titles.get(rank) != title:
            self._titles[rank] = title
            tabs.set_title(list(self._lines).index(rank), title)

    def _add_tab(self, rank: int) -> None:
        pane, tabs = self._make_text(), self._make_part("tabs", ipywidgets.Tab)
        pane.add_class("accel-run-lines")
        if pane.has_trait("tabbable"):  # since ipywidgets 8: lets the keyboard scroll it
            pane.tabbable = True
        self._lines[rank] = pane
        self._lines = dict(sorted(self._lines.items()))
        tabs.children = tuple(self._lines.values())
        if tabs.selected_index is None:
            tabs.selected_index = 0
        self._titles.clear()
        for number, known in enumerate(self._lines):
            tabs.set_title(number, f"rank {known}")

    def _on_stop(self, _: Any) -> None:
        self._stop_run()

    def _on_choice(self, _: Any) -> None:
        self._next_chart = 0.0


def _set(widget: Any, name: str, value: Any) -> None:
    """Change a trait only if its value differs, because the browser redraws it after every change."""
    if isinstance(value, str):
        value = escape_surrogates(value)
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
