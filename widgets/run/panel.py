"""Panel: the widgets of a live view."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ipywidgets

from notebook_accel.stream.series import Point
from notebook_accel.stream.sinks import escape_surrogates

from . import page, ranks, table
from .figures import Figures, close_whole
from .panes import Panes, choose_panes
from .parts import handle_clicks_during_cells, set_trait
from .picture import Picture

_CHART_SECONDS: Final = 1.0
# The element of the widget itself scrolls, because it stays when the text inside it changes. With the reversed
# direction it shows the newest line. If the user has scrolled up, it keeps that distance from the newest line.
# ipywidgets 7 brings a lighter red to the classic notebook, which is white.
_STYLE: Final = """<style>
body.notebook_app .accel-run { --jp-error-color1: #d32f2f; }
.accel-run { max-width: 64em; }
.accel-run .widget-html-content { line-height: 1.4; }
.accel-run .widget-html { overflow: visible; }
.accel-run .accel-run-lines.widget-html { display: flex; flex-direction: column-reverse; align-items: stretch;
  max-height: 18em; height: auto; overflow: auto; margin: 0; }
.accel-run .accel-run-lines > .widget-html-content { flex: 0 0 auto; width: 100%; }
.accel-run .accel-run-head { align-items: center; flex-wrap: wrap; overflow: visible; gap: 8px; }
.accel-run .accel-run-choices { gap: 16px; }
</style>"""


_CHOICES: Final = {
    "every": "all ranks",
    "log": "log scale",
    "each": "a line for each rank",
    "load": "memory and load",
}
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
        self._panes: Panes | None = None
        self._next_chart = 0.0
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
        handle_clicks_during_cells(self._stop)

    def show(self, picture: Picture) -> None:
        """Show a picture. The chart and hidden tabs change at most once a second.

        Args:
            picture: the run as it is now.
        """
        now = time.monotonic()
        set_trait(self.status, "value", f'<b role="status">{page.describe_status(picture)}</b>')
        set_trait(self._head, "value", page.render_headline(picture))
        set_trait(self._stop, "description", "Stop now" if picture.stopping else "Stop")
        every = self._is_chosen("every")
        if picture.distributed:
            self._show_text("table", table.render_table(picture, every_rank=every))
        self._show_text("notice", page.render_notice(picture))
        self._show_text("bars", page.render_bars(picture, every_rank=every))
        if now >= self._next_chart:
            self._next_chart = now + _CHART_SECONDS
            self._show_chart(picture)
            self._show_text("usage", page.render_usage(picture) if self._is_chosen("load") else "")
        if picture.distributed and (panes := choose_panes(picture, self._panes)) is not None:
            self._panes = panes
            panes.show(picture)
        self._show_text("hidden", page.render_hidden_outputs(picture) if self._panes is not None else "")
        self._show_text(
            "failure", page.render_failure(picture.failure) if picture.failure is not None else ""
        )
        if picture.background and (picture.displays or self._figures is not None):
            self._figures = self._figures or Figures()
            self._figures.show(picture.displays, names_ranks=len(picture.ranks) > 1)
        self._arrange(picture)

    @property
    def laid(self) -> Sequence[int] | None:
        """The ranks whose metrics the user has chosen to see over each other; None without this choice."""
        if not self._is_chosen("each"):
            return None
        return tuple(self._parts["ranks"].value) if "ranks" in self._parts else ()

    def end(self, html: str) -> None:
        """Show the static page in place of the widgets, and close these.

        Args:
            html: the static page.
        """
        parts = [*self.box.children, *self._upper.children, *self._parts.values()]
        self.box.children = (ipywidgets.HTML(escape_surrogates(html)),)
        held = [each for each in (self._figures, self._panes) if each is not None]
        for each in held:
            each.close()
        for part in dict.fromkeys(parts):
            if not any(part is each.box for each in held):
                close_whole(part)

    def _arrange(self, picture: Picture) -> None:
        """Show the widgets that have content, in their order."""
        has_more = len(picture.bars) > 1 or len(picture.ranks) > table.MOST_ROWS
        has_more = has_more and len(picture.ranks) <= table.MOST_SINGLE
        chart = self._find_filled("chart")
        choices = ["log"] if chart else []
        choices += ["each"] if chart and len(picture.measured) > 1 else []
        choices += ["load"] if picture.history else []
        parts: list[Any] = [self.box.children[0], self._upper, *self._find_filled("table", "notice", "bars")]
        parts += [self._make_choice("every")] if has_more else []
        parts += chart
        if choices:
            parts.append(self._make_part("choices", ipywidgets.HBox, "accel-run-choices"))
            set_trait(parts[-1], "children", tuple(map(self._make_choice, choices)))
        if "each" in choices and self._is_chosen("each") and len(picture.measured) > ranks.MOST_LAID:
            parts.append(self._make_list(picture))
        parts += self._find_filled("usage")
        parts += [self._panes.box, *self._find_filled("hidden")] if self._panes is not None else []
        parts += [self._figures.box] if self._figures is not None and self._figures.box.children else []
        parts += self._find_filled("failure")
        set_trait(self.box, "children", tuple(parts))
        upper = (self.status, self._head, *([self._stop] if picture.distributed else []))
        set_trait(self._upper, "children", upper)

    # -- parts

    def _make_text(self, value: str = "") -> Any:
        return ipywidgets.HTML(value, layout=self.status.layout, style=self.status.style)

    def _show_text(self, name: str, value: str) -> None:
        if value and name not in self._parts:
            self._parts[name] = self._make_text()
        if name in self._parts:
            set_trait(self._parts[name], "value", value)

    def _find_filled(self, *names: str) -> list[Any]:
        """Return the texts of these names that are not empty."""
        return [self._parts[name] for name in names if name in self._parts and self._parts[name].value]

    def _make_part(self, name: str, kind: Callable[[], Any], css_class: str = "") -> Any:
        """Return the part of a name, made where there is none yet."""
        if name not in self._parts:
            self._parts[name] = kind()
            if css_class:
                self._parts[name].add_class(css_class)
            handle_clicks_during_cells(self._parts[name])
        return self._parts[name]

    def _make_choice(self, name: str) -> Any:
        if name not in self._parts:
            box = self._make_part(name, lambda: ipywidgets.Checkbox(description=_CHOICES[name], indent=False))
            box.layout.width = "auto"
            box.observe(self._on_choice, names="value")
        return self._parts[name]

    def _make_list(self, picture: Picture) -> Any:
        """Return the list of the ranks that have metrics, to choose some of them."""
        known = self._parts.get("ranks")
        shown = self._make_part("ranks", lambda: ipywidgets.SelectMultiple(description="ranks", rows=6))
        if known is None:
            shown.layout.width, shown.style.description_width = "14em", "initial"
            shown.observe(self._on_choice, names="value")
        if tuple(shown.options) != picture.measured or (picture.rank_metrics and not shown.value):
            chosen = shown.value or tuple(picture.rank_metrics)
            with shown.hold_sync():  # new options choose none, for a moment
                shown.options = picture.measured
                shown.value = [rank for rank in chosen if rank in picture.measured]
        return shown

    def _is_chosen(self, name: str) -> bool:
        return name in self._parts and bool(self._parts[name].value)

    def _show_chart(self, picture: Picture) -> None:
        state = (
            self._is_chosen("log"),
            [_get_state(picture.metrics), *map(_get_state, picture.rank_metrics.values())],
            tuple(picture.rank_metrics),
        )
        if state != self._chart_state:
            self._chart_state = state
            self._show_text("chart", page.render_chart(picture, log=self._is_chosen("log")))

    def _on_stop(self, _: Any) -> None:
        self._stop_run()

    def _on_choice(self, _: Any) -> None:
        self._next_chart = 0.0


def _get_state(metrics: Mapping[str, Sequence[Point]]) -> object:
    return [(name, len(points), points[-1]) for name, points in metrics.items()]
