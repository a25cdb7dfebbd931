"""In a worker: turns `display()` and matplotlib's figures into display events."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Callable
from typing import Any

from ..events import ClearOutput, Display
from .emit import Emitter


def install(emitter: Emitter, flush: Callable[[], None]) -> None:
    """Make IPython in this worker publish through the emitter.

    In a forked worker the kernel's shell exists, and gets another publisher. In a new process a small shell is made if
    IPython was imported.

    Args:
        emitter: sends the events.
        flush: writes out earlier output, so that it comes before the display.
    """
    if "IPython" not in sys.modules:
        return
    from IPython.core.interactiveshell import InteractiveShell

    publisher = _publisher(emitter, flush)
    if InteractiveShell.initialized():
        shell = InteractiveShell.instance()
        shell.display_pub = publisher
        shell.config.pop("IPKernelApp", None)  # a library that sees it uses widgets
    else:
        _worker_shell(publisher)
    _forget_figures()


def flush_figures() -> None:
    """Show the figures that are still open, as a notebook does at the end of a cell."""
    inline = sys.modules.get("matplotlib_inline.backend_inline")
    if inline is not None:
        with contextlib.suppress(Exception):
            inline.show(True)


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
                    data=data,
                    metadata=metadata or {},
                    transient=transient or {},
                    update=update,
                )
            )

        def clear_output(self, wait: bool = False) -> None:
            flush()
            emitter.emit(ClearOutput(rank=emitter.rank, time=emitter.now(), wait=wait))

    return EventPublisher()  # type: ignore[no-untyped-call]


def _worker_shell(publisher: Any) -> None:
    """Make a shell that formats and publishes displays, without history, magics and hooks."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config.configurable import SingletonConfigurable

    class WorkerShell(InteractiveShell):
        """The parts of a shell that `display` and matplotlib need."""

        def __init__(self, **kwargs: Any) -> None:
            SingletonConfigurable.__init__(self, **kwargs)
            from IPython.core.events import EventManager, available_events

            self.configurables = [self]
            self.events = EventManager(self, available_events)
            self.init_display_formatter()  # type: ignore[no-untyped-call]
            self.display_pub = publisher
            self.user_ns = {}

    shell = WorkerShell.instance()
    from IPython.display import display

    builtins.display = display  # type: ignore[attr-defined]
    builtins.get_ipython = lambda: shell  # type: ignore[attr-defined]
