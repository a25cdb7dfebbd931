"""Panes: the newest lines of each rank, behind tabs, or behind a list to choose from where there are many ranks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import ipywidgets

from . import lines
from .figures import close_whole
from .parts import handle_clicks_during_cells, set_trait
from .picture import BAD, Output, Picture, sort_ranks
from .table import MOST_ROWS, SIGNS

_HIDDEN_SECONDS: Final = 1.0
_NAME: Final = "accel-run-lines"


class Panes(ABC):
    """Shows the newest lines of ranks, one rank at a time.

    Attributes:
        box: the widget that holds them.
    """

    box: Any

    @abstractmethod
    def show(self, picture: Picture) -> None:
        """Show the lines of a picture.

        Args:
            picture: the run as it is now.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all widgets."""


def choose_panes(picture: Picture, now: Panes | None) -> Panes | None:
    """Return what fits the number of ranks, and close what there was before.

    Args:
        picture: the run.
        now: what shows the lines now.

    Returns:
        None while no rank has lines.
    """
    kind = Tabs if len(picture.outputs) <= MOST_ROWS else Chooser
    if isinstance(now, kind):
        return now
    if now is not None:
        now.close()
    return kind() if list_written(picture) else None


def list_written(picture: Picture) -> dict[int, Output]:
    """Return the output of the ranks that have written something, those that failed first.

    Args:
        picture: the run.
    """
    return {rank: picture.outputs[rank] for rank in sort_ranks(picture) if picture.outputs[rank].rows}


def _get_state(output: Output) -> object:
    return output.total, [event.text for event in output.unfinished]


def _make_pane(like: Any = None) -> Any:
    """Return an empty pane, with the layout and style of another one: each of these is a message to the browser."""
    pane = ipywidgets.HTML() if like is None else ipywidgets.HTML(layout=like.layout, style=like.style)
    pane.add_class(_NAME)
    if pane.has_trait("tabbable"):  # since ipywidgets 8: lets the keyboard scroll it
        pane.tabbable = True
    return pane


class Tabs(Panes):
    """A tab for each rank. Hidden ones change at most once a second."""

    def __init__(self) -> None:
        self.box = ipywidgets.Tab()
        handle_clicks_during_cells(self.box)
        self._panes: dict[int, Any] = {}
        self._states: dict[int, object] = {}
        self._titles: dict[int, str] = {}
        self._next_hidden = 0.0

    def show(self, picture: Picture) -> None:
        """Show the lines of a picture, and mark the ranks that have failed.

        Args:
            picture: the run as it is now.
        """
        now = time.monotonic()
        for rank, output in sorted(list_written(picture).items()):
            self._show_lines(rank, output, now, is_bad=picture.find_status(rank) in BAD)
        if now >= self._next_hidden:
            self._next_hidden = now + _HIDDEN_SECONDS

    def _show_lines(self, rank: int, output: Output, now: float, *, is_bad: bool) -> None:
        if rank not in self._panes:
            self._add_tab(rank)
        place = list(self._panes).index(rank)
        title = f"rank {rank} ✗" if is_bad or lines.has_errors(output) else f"rank {rank}"
        if self._titles.get(rank) != title:
            self._titles[rank] = title
            self.box.set_title(place, title)
        hidden = self.box.selected_index != place
        state = _get_state(output)
        if self._states.get(rank) == state or (hidden and now < self._next_hidden):
            return
        self._states[rank] = state
        set_trait(self._panes[rank], "value", lines.render_lines(rank, output))

    def _add_tab(self, rank: int) -> None:
        self._panes[rank] = _make_pane(next(iter(self._panes.values()), None))
        self._panes = dict(sorted(self._panes.items()))
        self.box.children = tuple(self._panes.values())
        if self.box.selected_index is None:
            self.box.selected_index = 0
        self._titles.clear()
        for number, known in enumerate(self._panes):
            self.box.set_title(number, f"rank {known}")

    def close(self) -> None:
        """Close all widgets."""
        for part in (*self._panes.values(), self.box):
            close_whole(part)


class Chooser(Panes):
    """A list of the ranks, and one pane. The first in the list is shown until the user chooses: one that has failed."""

    def __init__(self) -> None:
        self._list = ipywidgets.Dropdown(options=[], description="lines of")
        self._list.layout.width = "20em"
        self._list.observe(self._on_choice, names="value")
        handle_clicks_during_cells(self._list)
        self._pane = _make_pane()
        self.box = ipywidgets.VBox([self._list, self._pane])
        self._options: Sequence[tuple[str, int]] = ()
        self._chosen: int | None = None
        self._is_ours = False  # the change of the list
        self._written: dict[int, Output] = {}
        self._state: object = None

    def show(self, picture: Picture) -> None:
        """Show the lines of the rank that is chosen.

        Args:
            picture: the run as it is now.
        """
        self._written = list_written(picture)
        options = [(_name_rank(picture, rank), rank) for rank in self._written]
        if options and options != self._options:
            self._options = options
            rank = self._chosen if self._chosen in self._written else options[0][1]
            self._is_ours = True
            try:
                with self._list.hold_sync():  # new options choose the first one, for a moment
                    self._list.options = options
                    self._list.value = rank
            finally:
                self._is_ours = False
        self._show_lines()

    def _show_lines(self) -> None:
        rank = self._list.value
        if rank not in self._written:
            return
        output = self._written[rank]
        state = (rank, _get_state(output))
        if state != self._state:
            self._state = state
            set_trait(self._pane, "value", lines.render_lines(rank, output))

    def _on_choice(self, _: Any) -> None:
        if not self._is_ours:
            self._chosen = self._list.value
            self._show_lines()

    def close(self) -> None:
        """Close all widgets."""
        for part in (self._list, self._pane, self.box):
            close_whole(part)


def _name_rank(picture: Picture, rank: int) -> str:
    status = picture.find_status(rank)
    if status in BAD:
        return f"rank {rank} {SIGNS[status]} {status}"
    return f"rank {rank} ✗" if lines.has_errors(picture.outputs[rank]) else f"rank {rank}"
