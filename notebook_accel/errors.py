"""The exception family: what a launch, a worker or a collective can raise.

::

    NotebookAccelError
    +-- LaunchError            a launch could not start
    |   +-- ShipError          an object could not be pickled for a worker (also a TypeError)
    |   +-- DeviceGuardError   the dry launch of ACCELERATE_DEBUG_MODE failed
    +-- WorkerError            a worker ended without an exception of its own
    |   +-- WorkerKilledError  by a signal
    |   +-- WorkerExitedError  by an exit code, or without returning
    +-- SessionError           a session cannot take a call: it is closed, busy, or has lost a worker
    +-- RunStoppedError        a run was stopped before it returned anything
    +-- RunLeftError           a run goes on, and nobody watches it here any more
    +-- HangError              a run made no progress, and was stopped
    +-- CollectiveError        ranks passed different inputs to a collective
    +-- ConfigError            options have wrong values
    |   +-- ConfigValueError   raised by what Accelerate has too (also a ValueError)
    +-- CheckpointError        a checkpoint could not be written, or does not fit what it is loaded into

Wrong arguments raise ValueError or TypeError. An exception raised inside a worker is raised in the notebook
with its own type, see `notebook_accel.launch.transfer.failures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NotebookAccelError(RuntimeError):
    """Base of all errors of this package."""


class LaunchError(NotebookAccelError):
    """A launch could not start. No process was started and nothing has changed."""


class ShipError(LaunchError, TypeError):
    """An object that a worker needs cannot be pickled; the message names the path to it."""


class DeviceGuardError(LaunchError):
    """The dry launch of ACCELERATE_DEBUG_MODE failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is wrong with an option.

    Attributes:
        name: of the option, with its section; empty where several options contradict each other.
        text: a sentence that says what is wrong.
        where: file and line of the value; empty where it does not come from a file.
    """

    name: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class ConfigError(NotebookAccelError):
    """Options have wrong values.

    It is no ValueError, because pydantic would turn that into an error of its own.

    Attributes:
        problems: all that is wrong, not only the first.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


class ConfigValueError(ConfigError, ValueError):
    """A ConfigError of functions that raise ValueError in Accelerate."""


class WorkerError(NotebookAccelError):
    """A worker ended without an exception of its own.

    Attributes:
        rank: the worker's rank.
        pid: its process id.
    """

    def __init__(self, message: str, *, rank: int, pid: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


class WorkerKilledError(WorkerError):
    """A signal ended a worker.

    Attributes:
        signum: number of the signal.
    """

    def __init__(self, message: str, *, rank: int, signum: int, pid: int | None = None) -> None:
        super().__init__(message, rank=rank, pid=pid)
        self.signum = signum


class WorkerExitedError(WorkerError):
    """A worker exited before its function returned.

    Attributes:
        exitcode: of its process; may be 0.
    """

    def __init__(self, message: str, *, rank: int, exitcode: int, pid: int | None = None) -> None:
        super().__init__(message, rank=rank, pid=pid)
        self.exitcode = exitcode


class SessionError(NotebookAccelError):
    """A session cannot take a call, because it is closed, busy, or has lost a worker. The call did not start."""


class HangError(NotebookAccelError):
    """A run made no progress for `hang_timeout` seconds and was stopped; the message says where each rank was."""


class RunStoppedError(NotebookAccelError):
    """The user stopped the run, and its workers ended before they returned."""


class RunLeftError(NotebookAccelError):
    """A run goes on without this process, which watches it no more: `notebook_accel.attach` shows it again."""


class CollectiveError(NotebookAccelError):
    """Ranks passed inputs of different structure, shape or dtype to one collective."""


class CheckpointError(NotebookAccelError):
    """A checkpoint could not be written, is damaged, or does not fit. Checkpoints and objects are unchanged."""


def _rebuild(cls: type[WorkerError], args: tuple[object, ...], state: dict[str, object]) -> WorkerError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
