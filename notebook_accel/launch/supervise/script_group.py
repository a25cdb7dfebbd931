"""The processes of one attempt that run a script: a fresh interpreter for each rank, which does nothing else."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final

from ...events import Event, Phase, Result
from .. import signals
from ..job import Job
from ..script import Script
from ..worker import script as worker
from .local_group import LocalWorkerGroup
from .starting import WorkerEnds
from .worker_group import Member

GRACE_SECONDS: Final = 30.0
"""How long scripts have to end after a signal, as under torch elastic: they may save what they have."""
_WORKER: Final = os.path.abspath(worker.__file__)
_NOTHING: Final = pickle.dumps(None)


class ScriptProcess:
    """The process of a rank.

    Args:
        script: what it runs.
        rank: its rank.
        environment: all its variables.
        stdout: descriptor of a pipe, or a file, for its output.
        stderr: likewise.
        events: descriptor of the socket by which it hears and answers.
        lifeline: descriptor of a pipe; the process is killed when its other end closes.

    Attributes:
        sentinel: -1, it has none of its own.
    """

    def __init__(
        self,
        script: Script,
        *,
        rank: int,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        events: int,
        lifeline: int,
    ) -> None:
        place = f"{rank},{events},{lifeline},{signals.STACK_SIGNAL or 0}"
        self._popen = subprocess.Popen(
            [sys.executable, _WORKER, place, script.kind, *script.words],
            env=environment,
            stdout=stdout,
            stderr=stderr,
            pass_fds=[events, lifeline],
            start_new_session=True,  # its process group is its own, and ends with it
        )
        self.sentinel = -1

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._popen.pid

    @property
    def exitcode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs, and where other code took it.

        `subprocess` says 0 in that case.
        """
        if sys.platform == "win32":
            return self._popen.poll()
        if self._popen.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return None
            if pid:
                self._popen.returncode = os.waitstatus_to_exitcode(status)
        return self._popen.returncode

    def join(self) -> None:
        """Wait for its end."""
        self._popen.wait()

    def close(self) -> None:
        """Give back what it held: nothing."""


class ScriptWorkerGroup(LocalWorkerGroup):
    """Starts an interpreter for each rank, which runs the script and nothing else.

    A rank's exit code says how it ended, as it does without a launcher: a script returns nothing.
    """

    def start(self) -> None:
        """Start a process per rank; all are ended where one cannot start."""
        super().start()
        now = time.time()
        running = [Phase(rank=rank, time=now, name="running", pid=pid) for rank, pid in self.pids.items()]
        self._delivery.deliver(running)

    def start_helpers(self) -> None:
        """Start nothing: interpreters are no processes of multiprocessing."""

    def prepare_process(self, rank: int, ends: WorkerEnds) -> Callable[[], ScriptProcess]:
        """Return what starts the interpreter of a rank."""
        assert isinstance(self._job.function, Script), "choose says so"
        assert ends.stdout is not None and ends.stderr is not None, "Windows runs scripts in other workers"
        return functools.partial(
            ScriptProcess,
            self._job.function,
            rank=rank,
            environment=self._environments[rank],
            stdout=ends.stdout.fileno(),
            stderr=ends.stderr.fileno(),
            events=ends.events.fileno(),
            lifeline=ends.lifeline.fileno(),
        )

    def can_be_asked(self, rank: int) -> bool:
        """Return whether a script has begun: before, the signal that shows its stack would end it."""
        return signals.STACK_SIGNAL is None or signals.is_caught(self.pids[rank], signals.STACK_SIGNAL)

    def judge_end(self, member: Member, exitcode: int | None, at: float) -> Event:
        """Return what it means that a process has ended: a script need not say that all is well."""
        if exitcode == 0:
            return Result(rank=member.rank, time=at, value=_NOTHING)
        return super().judge_end(member, exitcode, at)

    def stop(self, grace: float, signum: int = signal.SIGTERM) -> None:
        """End every process, and all that they started: by the signal that ends the launcher, else by SIGTERM.

        Args:
            grace: 0 kills at once; otherwise scripts have `GRACE_SECONDS`.
            signum: not used.
        """
        super().stop(GRACE_SECONDS if grace > 0 else 0.0, self._control.signum or signal.SIGTERM)


def choose(job: Job, setup: Callable[[], None] | None) -> type[LocalWorkerGroup]:
    """Return the kind of group that a job needs: interpreters where they run a script and nothing else.

    Args:
        job: after preflight.
        setup: what has to be called in each worker first; None for nothing.
    """
    is_plain = setup is None and isinstance(job.function, Script)
    runs_script = is_plain and job.start_method == "spawn" and sys.platform != "win32"
    return ScriptWorkerGroup if runs_script else LocalWorkerGroup
