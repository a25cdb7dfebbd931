"""Runs the work of a button in the kernel's main thread: only there processes can be started and signals caught."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any


def run(work: Callable[[], None]) -> None:
    """Run a function in the main thread, and return when it has ended.

    Kernels with subshells call a button's function in a thread of its own. That thread waits here, so that the kernel
    shows the output of the work as output of the click.

    Args:
        work: what to run; its exceptions are raised in the main thread.
    """
    kernel = None if threading.current_thread() is threading.main_thread() else _kernel()
    if kernel is None:
        work()
        return
    context = contextvars.copy_context()
    ended = threading.Event()

    def in_main_thread() -> None:
        kernel.pre_handler_hook()  # an interrupt reaches the work as it reaches a cell
        try:
            context.run(work)
        finally:
            kernel.post_handler_hook()
            ended.set()

    kernel.io_loop.add_callback(in_main_thread)
    ended.wait()


def _kernel() -> Any:
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None)
