"""The exception family: what a launch, a worker or a collective can raise.

::

    NotebookAccelError
    +-- LaunchError            a launch could not start
    |   +-- ShipError          an object could not be sent to a worker (also a TypeError)
    |   +-- DeviceGuardError   the dry launch of ACCELERATE_DEBUG_MODE failed
    +-- WorkerError            a worker ended without an exception of its own
    |   +-- WorkerKilledError  by a signal
    |   +-- WorkerExitedError  by an exit code, or without returning
    +-- SessionError           a session cannot take a call: it is closed, busy, or has lost a worker
    +-- RunStoppedError        a run was stopped before it returned anything
    +-- HangError              a run did nothing any more, and was ended
    +-- CollectiveError        ranks disagree about the input of a collective
    +-- ConfigError            options have wrong values
    +-- CheckpointError        a checkpoint could not be written, or does not fit what it is loaded into

Wrong arguments raise ValueError or TypeError. An exception raised inside a worker is raised in the notebook
with its own type, see `notebook_accel.launch.failures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class NotebookAccelError(RuntimeError):
    """Base of every error that is this package's own."""


class LaunchError(NotebookAccelError):
    """A launch could not start; nothing was started or changed."""


class ShipError(LaunchError, TypeError):
    """An object that a worker needs cannot be pickled; the message names the path that leads to it."""


class DeviceGuardError(LaunchError):
    """The dry launch that ACCELERATE_DEBUG_MODE asks for failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is wrong with an option.

    Attributes:
        name: of the option, with its section; empty where several options do not go together.
        text: a sentence.
        where: file and line, empty where the value is not from a file.
    """

    name: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class ConfigError(NotebookAccelError):
    """Options have wrong values, all of which `problems` lists.

    No ValueError: pydantic would make an error of its own of it.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.problems,)


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
    """A worker was ended by a signal; `signum` is its number."""

    def __init__(self, message: str, *, rank: int, signum: int, pid: int | None = None) -> None:
        super().__init__(message, rank=rank, pid=pid)
        self.signum = signum


class WorkerExitedError(WorkerError):
    """A worker left with an exit code, or with code 0 before its function returned; `exitcode` is the code."""

    def __init__(self, message: str, *, rank: int, exitcode: int, pid: int | None = None) -> None:
        super().__init__(message, rank=rank, pid=pid)
        self.exitcode = exitcode


class SessionError(NotebookAccelError):
    """A session cannot take a call: it is closed, busy, or has lost a worker; nothing of the call has run."""


class HangError(NotebookAccelError):
    """A run did nothing any more for `hang_timeout` seconds, and was ended; the message says where each rank was."""


class RunStoppedError(NotebookAccelError):
    """Somebody stopped the run, and its workers were ended before they returned."""


class CollectiveError(NotebookAccelError):
    """Ranks passed inputs of different structure, shape or dtype to one collective."""


class CheckpointError(NotebookAccelError):
    """A checkpoint could not be written, or is damaged or does not fit; checkpoints and objects are unchanged."""


def _rebuild(cls: type[WorkerError], args: tuple[object, ...], state: dict[str, object]) -> WorkerError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error
