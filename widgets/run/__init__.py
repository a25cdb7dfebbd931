"""The view of a run: live widgets in a notebook that become a static page, or text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accel import environ, probes
from notebook_accel.launch.run import Run
from notebook_accel.stream.sinks import Sink

if TYPE_CHECKING:
    from notebook_accel.config.launch_options import View


def make_sink(run: Run) -> Sink:
    """Make the sink that shows a run, as its job asks. Widgets are used in a notebook only.

    Args:
        run: the run; it has no events yet.
    """
    from .text import ErrorsOnly, PrintedRun, TextDisplay

    view = resolve_view(run.job.view)
    if view == "none":
        return ErrorsOnly(run)
    if probes.find_kernel_shell() is None:
        return PrintedRun(run)
    if view == "widget":
        from .view import RunView

        return RunView(run, at_once=run.job.distributed)
    return TextDisplay(run) if run.job.background else PrintedRun(run)


def resolve_view(view: View) -> View:
    """Return the view to use in this process.

    Args:
        view: what the job asks for.

    Returns:
        `widget`, `text` or `none`. `auto` becomes the value of NOTEBOOK_ACCEL_VIEW if it is set; otherwise `widget` if
        ipywidgets is installed, else `text`.
    """
    if view != "auto":
        return view
    asked = environ.get("NOTEBOOK_ACCEL_VIEW", "auto")
    if asked in ("widget", "text", "none"):
        return asked  # type: ignore[return-value]
    return "widget" if probes.is_available("ipywidgets") else "text"
