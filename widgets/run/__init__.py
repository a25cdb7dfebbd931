"""The view of a run: live widgets in a notebook that become a static page, or text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel import environ, probes
from notebook_accel.launch.run import Run
from notebook_accel.stream.sinks import Sink, kernel_shell

if TYPE_CHECKING:
    from notebook_accel.launch.job import View


def sink_for(run: Run) -> Sink:
    """Return what shows a run, as its job asks for: widgets in a notebook only."""
    from .text import ErrorsOnly, PrintedRun, TextDisplay

    view = chosen(run.job.view)
    if view == "none":
        return ErrorsOnly(run)
    if kernel_shell() is None:
        return PrintedRun(run)
    if view == "widget":
        from .view import RunView

        return RunView(run, at_once=run.job.distributed)
    return TextDisplay(run) if run.job.background else PrintedRun(run)


def chosen(view: View) -> View:
    """Return the view that `auto` means here: the environment's, else widgets where they are installed."""
    if view != "auto":
        return view
    asked = environ.get("NOTEBOOK_ACCEL_VIEW", "auto")
    if asked in ("widget", "text", "none"):
        return asked  # type: ignore[return-value]
    return "widget" if probes.is_available("ipywidgets") else "text"
