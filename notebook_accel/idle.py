"""Imports what the first launch needs while a Jupyter kernel has nothing to do, so that no cell waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

from . import interrupts, probes

_IDLE_SECONDS: Final = 0.2
"""How long no cell has run by then: the cells of "run all" follow each other at once."""

_LONG_IDLE_SECONDS: Final = 1.0
"""The same for torch's compiler, whose parts take longer than a user notices."""

_PAUSE_SECONDS: Final = 0.05
"""Between two parts, for a cell that has come meanwhile."""

_NEEDED: Final = (
    ".accelerator",
    ".session",
    ".launchers",
    ".launch.dry_run",
    ".launch.engines.local",
    ".stream.logs",
    ".widgets.run.text",
    "multiprocessing.popen_fork",
    "numpy.random",  # torch imports NumPy without it, and workers get its state
)


def watch_cells() -> None:
    """Import it some time after the end of a cell, once torch is imported, where this process is a Jupyter kernel."""
    shell = probes.find_kernel_shell()
    if shell is not None:
        ahead = _ImportAhead(shell)
        shell.events.register("pre_run_cell", ahead.wait)
        shell.events.register("post_run_cell", ahead)


class _ImportAhead:
    """What IPython calls at the end of each cell, until all is imported."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._owner = os.getpid()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_seconds = _IDLE_SECONDS
        self._parts = self._import_parts()

    def wait(self, info: object = None) -> None:
        """Do nothing while a cell runs: one that awaits lets the loop go on."""
        if self._timer is not None:
            self._timer.cancel()

    def __call__(self, result: object = None) -> None:
        self.wait()
        if probes.has_torch() and os.getpid() == self._owner:
            with contextlib.suppress(RuntimeError):  # no loop runs in this thread
                self._schedule(self._idle_seconds)

    def _schedule(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        """Import the next part; after the last one, cells end without this object."""
        is_over = True
        # what cannot be imported is told by the launch; an interrupt has nothing to interrupt now
        with contextlib.suppress(Exception, KeyboardInterrupt), interrupts.delay_interrupt():
            for pause in self._parts:
                is_over = False
                if pause is not None:
                    self._schedule(pause)
                break
        if is_over:
            for event, callback in (("post_run_cell", self), ("pre_run_cell", self.wait)):
                with contextlib.suppress(ValueError):  # it is unregistered
                    self._shell.events.unregister(event, callback)

    def _import_parts(self) -> Iterator[float | None]:
        """Import one part after the other; yields the seconds until the next one, or None: after another cell."""
        with contextlib.suppress(Exception):
            import_for_launch()
        from .launch.checks import compiler_preload, fork_obstacles  # here: they need torch

        self._idle_seconds = _LONG_IDLE_SECONDS
        yield _LONG_IDLE_SECONDS - _IDLE_SECONDS
        training = compiler_preload.TrainingWatch()
        while not training.look(list(self._shell.user_ns.values())):
            yield None
        if sys.platform != "linux":
            return  # workers are no forks of this process
        for name in compiler_preload.list_missing_parts():
            while fork_obstacles.reasons():
                if not fork_obstacles.may_pass():
                    return  # nor here
                yield None
            compiler_preload.load(name)
            yield _PAUSE_SECONDS


def import_for_launch() -> None:
    """Import what a launch on this machine needs, and the view that shows runs here."""
    for name in _NEEDED:
        importlib.import_module(name, __package__)
    views = importlib.import_module(".widgets.run", __package__)
    if views.resolve_view("auto") == "widget":
        views.import_widgets()  # a launch tells why that fails
