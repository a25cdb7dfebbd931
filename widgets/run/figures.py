"""Figures: a widget for each display of the ranks, so that only those that change travel to the browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets

from notebook_accel.events import Display

from . import page


class Figures:
    """The displays of a run below each other.

    Attributes:
        box: the widget that holds them.
    """

    def __init__(self) -> None:
        self.box = ipywidgets.VBox([])
        self._shown: list[tuple[Display, Any]] = []  # displays with their widgets, as the box has them

    def show(self, displays: Sequence[Display], *, names_ranks: bool) -> None:
        """Show displays; those that are shown already are not sent again.

        Args:
            displays: oldest first.
            names_ranks: whether to say above each whose it is.
        """
        if [id(display) for display, _ in self._shown] == [id(display) for display in displays]:
            return
        known = {id(display): widget for display, widget in self._shown}
        wanted = {id(display) for display in displays}
        free = [widget for display, widget in self._shown if id(display) not in wanted]
        self._shown = [
            (each, known.get(id(each)) or self._draw(each, names_ranks, free)) for each in displays
        ]
        self.box.children = tuple(widget for _, widget in self._shown)
        _close(free)

    def close(self) -> None:
        """Close all widgets."""
        _close([*(widget for _, widget in self._shown), self.box])
        self._shown.clear()

    def _draw(self, display: Display, names_ranks: bool, free: list[Any]) -> Any:
        html = page.render_displays([display], names_ranks=names_ranks)
        if not free:
            return ipywidgets.HTML(html)
        widget = free.pop(0)
        widget.value = html
        return widget


def _close(widgets: Sequence[Any]) -> None:
    for widget in widgets:
        close_whole(widget)


def close_whole(widget: Any) -> None:
    """Close a widget with its layout and style: `close` alone leaves them open, and ipywidgets keeps them."""
    widget.layout.close()
    if widget.has_trait("style"):
        widget.style.close()
    widget.close()
