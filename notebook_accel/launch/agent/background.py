"""What a Jupyter kernel does for its launches while nobody waits: it starts the agent, and imports what they need."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from ... import environ, interrupts, probes

if TYPE_CHECKING:
    from ..checks.compiler_preload import TrainingWatch

VARIABLE: Final = "NOTEBOOK_ACCEL_AGENT"
"""Turns it off, where it is false: then the first launch starts the agent."""
_LEAST_BYTES: Final = 2 << 30
"""Memory that has to be free for an agent that no launch has asked for."""
_IDLE_SECONDS: Final = 0.2
"""How long no cell has run by then: the cells of "run all" follow each other at once."""
_LONG_IDLE_SECONDS: Final = 1.0
"""The same for torch's compiler, which takes longer than a user notices."""
_OF_LAUNCHES: Final = (
    "notebook_accel.accelerator",
    "notebook_accel.session",
    "notebook_accel.launchers",
    "notebook_accel.launch.dry_run",
    "notebook_accel.launch.engines.local",
    "notebook_accel.stream.logs",
    "notebook_accel.widgets.run.text",
    *("multiprocessing.popen_fork", "numpy.random"),  # which these libraries import at their first use
)


def watch_cells() -> None:
    """Work ahead from the end of a cell on, where this process is a Jupyter kernel."""
    shell = probes.find_kernel_shell()
    if shell is not None:
        watcher = _CellWatcher(shell)
        shell.events.register("pre_run_cell", watcher.wait)
        shell.events.register("post_run_cell", watcher)


class _CellWatcher:
    """What IPython calls at the end of each cell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._owner = os.getpid()
        self._timer: asyncio.TimerHandle | None = None
        self._num_modules = 0  # when the agent was told last
        self._training: TrainingWatch | None = None
        self._trains = False
        self._has_imported = False

    def wait(self, info: object = None) -> None:
        """Do nothing while a cell runs: one that awaits lets the loop go on."""
        if self._timer is not None:
            self._timer.cancel()

    def __call__(self, result: object = None) -> None:
        self.wait()
        if os.getpid() != self._owner or threading.current_thread() is not threading.main_thread():
            return
        # the cell is over: an interrupt that comes now has nothing to interrupt. What fails is told by the launch
        with contextlib.suppress(KeyboardInterrupt, OSError, RuntimeError), interrupts.delay_interrupt():
            if probes.has_torch():
                self._look_for_training()
                self._tell_agent()
                self._schedule(_IDLE_SECONDS)

    def _look_for_training(self) -> None:
        from ..checks.compiler_preload import TrainingWatch  # here, as below: it needs torch

        self._training = self._training or TrainingWatch()
        self._trains = self._training.look(list(self._shell.user_ns.values())) or self._trains

    def _tell_agent(self) -> None:
        """Start an agent where there is none, and let it import what the notebook has imported."""
        if not environ.flag(VARIABLE, default=True):
            return
        from ..checks import compiler_preload
        from ..memory_kills import find_free_memory
        from . import client
        from .modules import Modules
        from .orders import ImportOrder

        agent = client.find()
        if agent is None:
            if find_free_memory() < _LEAST_BYTES:
                return
            agent, self._num_modules = client.start(background=True), 0
        number = len(sys.modules) + self._trains
        if number != self._num_modules:
            self._num_modules = number
            modules = Modules.capture([compiler_preload.MODULE] if self._trains else [])
            variables, path = environ.snapshot(), list(sys.path)
            agent.import_ahead(
                ImportOrder(modules=modules, environment=variables, path=path, in_background=True)
            )

    def _schedule(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._import_ahead)

    def _import_ahead(self) -> None:
        """Import what launches need in this process: first their modules, then the compiler, for forks that train."""
        from ..checks import compiler_preload, fork_obstacles, fork_safety, patches

        # what cannot be imported is told by the launch
        with contextlib.suppress(Exception, KeyboardInterrupt), interrupts.delay_interrupt():
            if not self._has_imported:
                self._has_imported = True
                import_for_launch()
                patches.find()
                self._tell_agent()
                self._schedule(_LONG_IDLE_SECONDS)
            elif (
                self._trains
                and not compiler_preload.is_loaded()
                and fork_safety.choose_start_method(fork_obstacles.reasons()) == "fork"
            ):
                compiler_preload.load()


def import_for_launch() -> None:
    """Import what a launch on this machine needs, and the view that shows runs here."""
    for name in _OF_LAUNCHES:
        importlib.import_module(name)
    views = importlib.import_module("notebook_accel.widgets.run")
    if views.resolve_view("auto") == "widget":
        views.import_widgets()
