"""What the widgets of a view have in common: how they change, and how clicks reach them."""

from __future__ import annotations

from typing import Any

from notebook_accel.stream.sinks import escape_surrogates


def set_trait(widget: Any, name: str, value: Any) -> None:
    """Change a trait only if its value differs, because the browser redraws it after every change.

    Args:
        widget: which widget.
        name: of the trait.
        value: its new value.
    """
    if isinstance(value, str):
        value = escape_surrogates(value)
    if getattr(widget, name) != value:
        setattr(widget, name, value)


def handle_clicks_during_cells(*widgets: Any) -> None:
    """Let clicks be handled while a cell runs, if the front end sends them to a thread of their own (a subshell).

    ipykernel 7.4 would send them back to the thread that made the widget, which is busy with the cell.

    Args:
        widgets: what the user clicks on.
    """
    for widget in widgets:
        comm: Any = getattr(widget, "comm", None)
        if hasattr(comm, "_reply_subshell_for"):
            comm._reply_subshell_for = None
