"""In a worker: turns `display()` and matplotlib's figures into display events, and IPython's tracebacks into output."""

from __future__ import annotations

import ast
import builtins
import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

from ..events import ClearOutput, Display
from .emit import Emitter

_WIDGET_VIEW: Final = "application/vnd.jupyter.widget-view+json"


def prepare() -> None:
    """Make the shell that fresh workers have, if IPython was imported: forks of this process need not make it."""
    if "IPython" in sys.modules:
        _make_shell()


def install(emitter: Emitter, flush: Callable[[], None]) -> None:
    """Make IPython in this worker publish through the emitter, if it was imported.

    In a fork of the kernel its shell gets another publisher. A fresh worker has a small shell.

    Args:
        emitter: sends the events.
        flush: writes out earlier output, so that it comes before the display.
    """
    if "IPython" not in sys.modules:
        return
    from IPython.core.interactiveshell import InteractiveShell

    publisher = _publisher(emitter, flush)
    shell: Any = InteractiveShell.instance() if InteractiveShell.initialized() else _make_shell()
    if getattr(shell, "is_of_worker", False):
        shell.display_pub, shell.write_out = publisher, flush
    else:
        _redirect(shell, publisher, flush)
        _cut_off(shell)
    _forget_figures()


def flush_figures() -> None:
    """Show the figures that are still open, as a notebook does at the end of a cell."""
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    if inline is not None:
        with contextlib.suppress(Exception):
            inline.show(True)


def _redirect(shell: Any, publisher: Any, flush: Callable[[], None]) -> None:
    """Let a forked shell show all that it shows as output of this worker: the sockets of the kernel end at the fork."""

    def show_traceback(kind: object, error: object, lines: list[str]) -> None:
        _write_error("\n".join(lines), flush)

    def publish(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
        publisher.publish(data, metadata)

    def do_nothing() -> None:
        pass

    shell.display_pub = publisher
    shell._showtraceback = show_traceback  # what kernels, too, override
    hook = shell.displayhook  # it shows the values of `run_cell`
    hook.start_displayhook = hook.write_output_prompt = hook.finish_displayhook = do_nothing
    hook.write_format_data = publish


def _cut_off(shell: Any) -> None:
    """Keep libraries from sending anything by a forked shell's kernel: no front end would get it.

    They take this process for one without a notebook, as they do in a worker that is no fork: bars of tqdm and Rich
    are text. Widgets that somebody makes all the same are objects that nobody shows.
    """
    shell.config.pop("IPKernelApp", None)  # tqdm looks at it
    kind = type(shell)
    if kind.__name__ == "ZMQInteractiveShell" or kind.__module__.startswith(
        "google.colab"
    ):  # Rich looks at that
        shell.__class__ = type("WorkerShell", (kind,), {"__module__": __name__})
    if (console := getattr(sys.modules.get("rich"), "_console", None)) is not None:
        console.is_jupyter = False  # the one that all its functions share, made in the notebook
    session = getattr(getattr(shell, "kernel", None), "session", None)
    if session is not None:
        session.send = lambda *args, **kwargs: None  # its own one, in a fork, prints what it does not send


def _write_error(text: str, flush: Callable[[], None]) -> None:
    flush()
    print(text, file=sys.stderr, flush=True)


def _format_error(error: BaseException) -> str:
    """Return a traceback that begins in the user's code, as a kernel shows it."""
    with contextlib.suppress(Exception):  # of the error's own code
        if hasattr(error, "_render_traceback_"):
            return "\n".join(error._render_traceback_())
    trace = error.__traceback__
    while trace is not None and _is_of_shell(trace.tb_frame.f_globals.get("__name__")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _is_of_shell(module: Any) -> bool:
    return str(module).startswith("IPython.") or module == __name__


def _forget_figures() -> None:
    """Drop the figures that the kernel had open: the notebook shows them."""
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    if helpers is not None:
        helpers.Gcf.figs.clear()


def _publisher(emitter: Emitter, flush: Callable[[], None]) -> Any:
    from IPython.core.displaypub import DisplayPublisher

    class EventPublisher(DisplayPublisher):
        """Publishes MIME bundles as events of the run."""

        def publish(
            self,
            data: dict[str, Any],
            metadata: dict[str, Any] | None = None,
            source: object = None,
            *,
            transient: dict[str, Any] | None = None,
            update: bool = False,
            **kwargs: object,
        ) -> None:
            flush()
            emitter.emit(
                Display(
                    rank=emitter.rank,
                    time=emitter.now(),
                    data=_leave_out_widgets(data),
                    metadata=metadata or {},
                    transient=transient or {},
                    update=update,
                )
            )

        def set_parent(self, parent: object) -> None:
            """Do nothing: ipywidgets says which message of the front end it answers, and here is none."""

        def clear_output(self, wait: bool = False) -> None:
            flush()
            emitter.emit(ClearOutput(rank=emitter.rank, time=emitter.now(), wait=wait))

    return EventPublisher()  # type: ignore[no-untyped-call]


def _leave_out_widgets(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle without the view of a widget, which no front end can change from here, if it has other forms."""
    others = {kind: value for kind, value in data.items() if kind != _WIDGET_VIEW}
    return others or data


def _make_shell() -> Any:
    """Return a shell that formats and publishes displays and shows errors, without history, magics and hooks.

    It needs a publisher, and what writes out earlier output.
    """
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
    from traitlets.config.configurable import SingletonConfigurable

    class WorkerShell(InteractiveShell):
        """The parts of a shell that `display` and matplotlib need."""

        is_of_worker = True

        def __init__(self, **kwargs: Any) -> None:
            SingletonConfigurable.__init__(self, **kwargs)
            from IPython.core.events import EventManager, available_events

            self.configurables = [self]
            self.events = EventManager(self, available_events)
            self.init_display_formatter()  # type: ignore[no-untyped-call]
            self.user_ns = {}

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"the shell of a worker that is no fork of the kernel has no {name!r}: it shows displays and "
                "tracebacks, and runs plain code"
            )

        def showtraceback(self, exc_tuple: Any = None, *args: object, **kwargs: object) -> None:
            """Write the traceback of an error, by default of the one that is handled, to stderr."""
            error = (exc_tuple or sys.exc_info())[1]
            text = "No traceback available to show." if error is None else _format_error(error)
            _write_error(text, self.write_out)

        def run_cell(self, raw_cell: str, *args: object, **kwargs: object) -> Any:
            """Run plain code, without magics and history; show its last value, or its error."""
            result = ExecutionResult(None)
            try:
                result.result = _run_plain(raw_cell, self.user_ns)
                if result.result is not None:
                    self.display_pub.publish(*self.display_formatter.format(result.result))
            except Exception as error:
                result.error_in_exec = error
                self.showtraceback()
            return result

    shell = WorkerShell.instance()
    from IPython.display import display

    builtins.display = display  # type: ignore[attr-defined]
    builtins.get_ipython = lambda: shell  # type: ignore[attr-defined]
    return shell


def _run_plain(source: str, namespace: dict[str, Any]) -> Any:
    """Run code; return the value of its last expression."""
    tree: Any = compile(source, "<cell>", "exec", ast.PyCF_ONLY_AST)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
