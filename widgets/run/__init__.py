"""The view of a run: live widgets in a notebook that become a static page, or text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from notebook_accel import caller, environ, probes
from notebook_accel.errors import LaunchError
from notebook_accel.launch.run import Run
from notebook_accel.stream.sinks import Sink

if TYPE_CHECKING:
    from notebook_accel.config.launch_options import View

_VARIABLE: Final = "NOTEBOOK_ACCEL_VIEW"


def make_sink(run: Run) -> Sink:
    """Make the sink that shows a run, as its job asks. Widgets are used in a notebook only.

    Args:
        run: the run; it has no events yet.

    Raises:
        LaunchError: widgets were asked for by name, and cannot be imported.
    """
    from .text import ErrorsOnly, PrintedRun, TextDisplay

    view = resolve_view(run.job.view)
    if view == "none":
        return ErrorsOnly(run)
    if probes.find_kernel_shell() is None:
        return PrintedRun(run)
    if view == "widget":
        problem = import_widgets()
        if not problem:
            from .view import RunView

            return RunView(run, at_once=run.job.distributed)
        asked = "view='widget'" if run.job.view == "widget" else "NOTEBOOK_ACCEL_VIEW=widget"
        if "widget" in (run.job.view, environ.get(_VARIABLE, "")):
            raise LaunchError(f"{asked}: ipywidgets cannot be imported here ({problem})")
        caller.warn(f"ipywidgets cannot be imported ({problem}): runs are shown as text")
    return TextDisplay(run) if run.job.background else PrintedRun(run)


def import_widgets() -> str:
    """Import what shows runs as widgets.

    Returns:
        Why that fails: ipywidgets is broken, or a module beside the notebook has its name. Empty where it does not.
    """
    problem = probes.find_widgets_problem()
    if not problem:
        from . import view  # noqa: F401
    return problem


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
    asked = environ.get(_VARIABLE, "auto")
    if asked in ("widget", "text", "none"):
        return asked  # type: ignore[return-value]
    return "widget" if probes.is_available("ipywidgets") else "text"
