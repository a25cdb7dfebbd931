"""Runs on a machine that outlive the notebook: how one is started here, and how it is shown."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from dataclasses import replace
from typing import Final

from .... import interrupts
from ....errors import LaunchError
from ....events import Notice
from ....stream.readable import wait_readable
from ...agent import client
from ...agent.orders import WorkerOrder
from ...agent.parent_state import ParentState
from ...agent.worker import Program
from ...job import Job
from ...transfer.shared_memory import SharedPickle
from ..base import Outcome
from .folder import LOG, Folder, describe_here, make
from .watch import SILENT_SECONDS, Watch

_DRIVER: Final = "notebook_accel.launch.engines.local_driver"
_LOOK_SECONDS: Final = 0.2
_LOCK_SECONDS: Final = 1.0


def start_driver(job: Job, payload: SharedPickle, state: ParentState) -> Folder:
    """Start the process that runs a job without this one, and return the folder of its run.

    Args:
        job: what runs.
        payload: its function and arguments.
        state: what its workers find of this process.

    Raises:
        LaunchError: it cannot start, or the folder cannot be made.
    """
    folder = make()
    try:
        with contextlib.ExitStack() as held:
            lock = held.enter_context(contextlib.closing(folder.hold()))
            folder.fill(job, state.sources, describe_here())
            log = os.open(folder.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            held.callback(os.close, log)
            _order_driver(folder, payload, state, lock.fd, log)
    except OSError as error:
        folder.remove()  # else a full disk would stay full
        raise LaunchError(f"the run cannot be left to a process of its own: {error}") from error
    except BaseException:
        folder.remove()
        raise
    return folder


def _order_driver(folder: Folder, payload: SharedPickle, state: ParentState, lock: int, log: int) -> None:
    program = Program(module=_DRIVER, arguments=[str(folder.path), state, payload.layout])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fds = [theirs.fileno(), log, log, lock, *payload.filenos()]
        order = WorkerOrder(
            rank=0,
            environment=state.variables,
            directory=os.sep,
            limits=state.limits,
            imports=replace(state.imports, path=client.list_path()),
            work=pickle.dumps(program),
            num_fds=len(fds) + 2,
            outlives=True,
        )
        driver = client.order(order, fds)
        try:
            while not driver.pid and not driver.look():
                wait_readable(driver.fileno(), _LOOK_SECONDS)
                interrupts.obey_interrupt()
            if not driver.pid:
                raise LaunchError(driver.problem)
        finally:
            driver.close()


class LocalWatch(Watch):
    """Shows a run on a machine, this one or another that writes to the same folder."""

    _is_silent = False
    _looked = 0.0

    def look(self) -> Outcome | None:
        """Return the outcome of a run whose driver has ended without a word; tell one that is silent."""
        now = time.monotonic()
        if now - self._looked < _LOCK_SECONDS:
            return None
        self._looked = now
        if not self._folder.is_held:
            if self.pass_on():  # its last words, written since
                return None
            return self._make_lost_outcome()
        is_silent = now - self._heard > SILENT_SECONDS
        if is_silent and not self._is_silent:
            text = (
                f"Nothing has come from {self._folder.title} for {SILENT_SECONDS:g} s: is there room for what "
                f"it writes in {self._folder.path}, and does its machine run?"
            )
            self.say(Notice(rank=-1, time=time.time(), text=text))
        self._is_silent = is_silent
        return None

    def pass_stop_on(self, grace: float) -> None:
        """Leave word in the folder."""
        try:
            self._folder.ask_to_stop(grace)
        except OSError as error:
            text = f"the run cannot be asked to stop: {error}"
            self.say(Notice(rank=-1, time=time.time(), text=text))

    def _make_lost_outcome(self) -> Outcome:
        ended = self._said or None
        if self.was_asked_to_stop and self._record.phases and not self._folder.has_restarted:
            return self.make_stopped_outcome(ended)
        why = "the process that drives it was ended from outside"
        if self._folder.has_restarted:
            why = "its machine was started again"
        elif not self._folder.is_local:
            why = f"it ran on {self._folder.read_metadata().get('host')}, which is not heard of any more"
        text = f"{self._folder.title} is lost: {why}. What it had said until then is shown"
        if said := [line for line in self._folder.read_log() if line.strip()]:
            text += "\n" + "\n".join(said)
        return Outcome(error=LaunchError(text), ended=ended)
