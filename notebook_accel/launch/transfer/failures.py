"""A worker's exception, from the worker to the cell.

It is raised in the notebook with its own type, its causes, and a traceback whose frames are the worker's: IPython
shows the lines of the cell.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import linecache
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeGuard

from ...errors import WorkerError, WorkerExitedError, WorkerKilledError
from ...events import Failure, Pickle, RaisedError
from ...stream.emit import Emitter
from ...trust import plain
from ..rank_names import name_process
from ..signals import likely_cause, name_of
from . import tracebacks
from .pickling import pack, unpack

_MAX_CHAIN = 8
_MOST_FRAMES = 5_000  # of an exception of another node
_MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def describe(error: BaseException, path: Sequence[int] = ()) -> RaisedError:
    """In the worker: return an exception with its notes and causes, as values that travel.

    Long chains are cut, and those that lead back to where they began.

    Args:
        error: any.
        path: ids of the exceptions that lead to this one.
    """
    inside = (*path, id(error))

    def may_describe(other: BaseException | None) -> TypeGuard[BaseException]:
        return other is not None and id(other) not in inside and len(inside) <= _MAX_CHAIN

    cause, context = error.__cause__, error.__context__
    return RaisedError(
        type_name=type(error).__qualname__,
        message=_read_text(error),
        pickled=_pickle(error),
        frames=tracebacks.read_frames(error.__traceback__),
        arguments=_read_arguments(error),
        notes=_read_notes(error),
        parts=tuple(describe(part, inside) for part in _list_parts(error) if may_describe(part)),
        cause=describe(cause, inside) if may_describe(cause) else None,
        context=describe(context, inside) if context is not cause and may_describe(context) else None,
        suppress_context=error.__suppress_context__,
    )


def report(emitter: Emitter, error: BaseException) -> None:
    """In the worker: send an exception as this rank's failure."""
    emitter.emit(make_failure(emitter, error))


def make_failure(emitter: Emitter, error: BaseException) -> Failure:
    """In the worker: return an exception as this rank's failure."""
    now, moment = emitter.now(), time.monotonic()
    try:
        raised = describe(error)
    except BaseException as broken:  # an exception with odd attributes still has a name and a place
        text = f"{_read_text(error)} (it could not be described: {type(broken).__name__}: {broken})"
        frames = tracebacks.read_frames(BaseException.__dict__["__traceback__"].__get__(error))
        raised = RaisedError(type_name=type(error).__qualname__, message=text, pickled=None, frames=frames)
    return Failure(rank=emitter.rank, time=now, pid=os.getpid(), error=raised, moment=moment)


def revive(raised: RaisedError, rank: int, pid: int) -> BaseException:
    """In the notebook: make an exception again.

    Args:
        raised: the exception, as `describe` returned it.
        rank: the rank that raised it.
        pid: that rank's process id.

    Returns:
        The exception with its own type, or a WorkerError where it cannot be made again. Without its pickle, as it
        comes from a node that proves no secret, only Python's own exceptions have their type.
    """
    error = _unpickle(raised)
    if error is None:
        error = _make_builtin(raised)
    if error is None:
        error = WorkerError(f"{raised.type_name}: {raised.message}", rank=rank, pid=pid)
    if raised.notes and not getattr(error, "__notes__", None):
        for note in raised.notes:
            add_note(error, note)
    _complete(error, raised, rank, pid)
    return error


def rename_files(failure: Failure) -> Failure:
    """Return a failure of another node's rank with names of files that may be read here to show their lines.

    A cell that this notebook has run as well has its own name: IPython names a cell's file by a hash of its text, and
    the folder differs between kernels. What is no file of source here gets a name that no file has: nobody knows who
    wrote it, and to read a device or a pipe may never end.
    """
    if failure.error is None:
        return failure
    own = {os.path.basename(name): name for name in linecache.cache if "ipykernel_" in name}

    def choose(name: str) -> str:
        if os.path.basename(name) in own:
            return own[os.path.basename(name)]
        is_source = name.endswith(".py") and os.path.isfile(name)
        if is_source or (name.startswith("<") and name.endswith(">")):  # such as <string>, which no file has
            return name
        return f"<{name.encode('utf-8', 'backslashreplace').decode()}>"

    def rename(raised: RaisedError) -> RaisedError:
        return replace(
            raised,
            frames=[
                replace(frame, filename=choose(frame.filename)) for frame in raised.frames[-_MOST_FRAMES:]
            ],
            parts=[rename(part) for part in raised.parts],
            cause=None if raised.cause is None else rename(raised.cause),
            context=None if raised.context is None else rename(raised.context),
        )

    return replace(failure, error=rename(failure.error))


def _complete(error: BaseException, raised: RaisedError, rank: int, pid: int) -> None:
    """Give an exception, and those that a group holds, the worker's traceback and causes."""
    error.__cause__ = revive(raised.cause, rank, pid) if raised.cause else None
    error.__context__ = revive(raised.context, rank, pid) if raised.context else None
    error.__suppress_context__ = raised.suppress_context
    error.__traceback__ = tracebacks.build(raised.frames)
    for part, described in zip(_list_parts(error), raised.parts, strict=False):
        _complete(part, described, rank, pid)


def _list_parts(error: BaseException) -> Sequence[BaseException]:
    """Return the exceptions that a group holds."""
    group = getattr(builtins, "BaseExceptionGroup", ())  # from Python 3.11 on
    return tuple(error.exceptions) if isinstance(error, group) else ()


def _read_arguments(error: BaseException) -> tuple[str | int | float | bool | None, ...] | None:
    """Return what one of Python's own exceptions was made with, or its text where one of these is not plain.

    It is None for other exceptions.
    """
    if type(error) is not getattr(builtins, type(error).__qualname__, None):
        return None
    arguments = error.__reduce__()[1]  # `args` of an OSError lacks the file
    is_plain = all(plain.is_plain(each) for each in arguments)
    return tuple(arguments) if is_plain else (_read_text(error),)


def _make_builtin(raised: RaisedError) -> BaseException | None:
    """Return one of Python's own exceptions by its name; None of others, and of those that end a process."""
    kind = getattr(builtins, raised.type_name, None)
    if raised.arguments is None or not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        return kind(*raised.arguments)
    except (TypeError, ValueError):  # a group of exceptions, for example
        return None


def _read_notes(error: BaseException) -> tuple[str, ...]:
    notes = getattr(error, "__notes__", ())
    return tuple(map(_read_text, notes)) if isinstance(notes, (list, tuple)) else (_read_text(notes),)


def make_exit_error(failure: Failure, last_words: Sequence[str] | None = None) -> WorkerError:
    """Return the error for a worker that ended without an exception of its own.

    Args:
        failure: says how the process ended, or that it is lost.
        last_words: the last lines of its errors, where it ended before it called its function; None where it called it.
    """
    code, rank, pid = failure.exitcode, failure.rank, failure.pid
    who = name_process(rank, pid, failure.node)
    if failure.lost:
        return WorkerError(f"{who if pid else f'rank {rank}'} is lost: {failure.lost}", rank=rank, pid=pid)
    if code is None:
        text = (
            f"{who} ended before its function returned, and nobody knows how: this process ignores SIGCHLD, "
            "or other code of it has waited for the worker"
        )
        return WorkerError(text, rank=rank, pid=pid)
    if code < 0:
        cause = find_killer(failure)
        text = f"{who} was ended by {name_of(-code)}" + (f": {cause}" if cause else "")
        return WorkerKilledError(text, rank=rank, pid=pid, signum=-code)
    text = f"{who} left with exit code {code} before its function {'returned' if last_words is None else 'began'}"
    if last_words:
        text += "; it wrote:\n" + "\n".join(last_words)
    return WorkerExitedError(text, rank=rank, pid=pid, exitcode=code)


def find_killer(failure: Failure) -> str:
    """Return who sent the signal that ended a process, or why it came, as a clause; empty where nobody knows.

    Args:
        failure: its exit code is that of a signal.
    """
    return failure.killer or likely_cause(-(failure.exitcode or 0))


_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Connection timed out",
    "No route to host",
    "Network is unreachable",
)
_LOST_BY_NCCL = ("remote process exited", "closed by remote peer")
_LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
_SAME_MOMENT = 1.0


def find_first(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others.

    That is the first by time, with two exceptions. The end of a process is noticed late, after its peers have reported
    a lost connection: then the end counts as first. Of ends that were noticed together, that of a killed process does.

    Args:
        failures: at least one.
    """
    is_of_here = all(failure.moment is not None for failure in failures)

    def find_time(failure: Failure) -> float:
        return failure.moment if is_of_here and failure.moment is not None else failure.time

    def may_precede(end: Failure, moment: float | None) -> bool:
        return is_of_here and end.alive is not None and moment is not None and end.alive <= moment

    cause = min(failures, key=find_time)
    ends = [failure for failure in failures if failure.error is None]
    if cause.error is not None:
        after = find_time(cause)
        ends = [end for end in ends if find_time(end) - after < _SAME_MOMENT or may_precede(end, after)]
        if not (ends and _names_lost_peer(cause.error)):
            return cause
        cause = min(ends, key=find_time)
    together = [end for end in ends if end is cause or may_precede(end, cause.alive)]
    return min(together, key=lambda end: (not _was_killed(end), find_time(end)))


def _was_killed(end: Failure) -> bool:
    """Return whether a signal ended a process; not one that it sent to itself, as C code does that loses a peer."""
    return end.exitcode is not None and end.exitcode < 0 and end.exitcode != -signal.SIGABRT


def is_lost_peer(failure: Failure) -> bool:
    """Return whether a rank failed because another one was gone."""
    return failure.error is not None and _names_lost_peer(failure.error)


def _names_lost_peer(raised: RaisedError) -> bool:
    return raised.type_name in _LOST_PEER_TYPES or any(text in raised.message for text in _LOST_PEER)


def describe_failure(failure: Failure, cause: Failure | None = None) -> str:
    """Return in a line what happened to a rank.

    Args:
        failure: of the rank.
        cause: the first failure. A rank whose collective failed because that rank was gone says so, in place of what
            gloo or NCCL says, see `describe_library`.
    """
    if failure.error is None:
        return str(make_exit_error(failure))
    who = name_process(failure.rank, failure.pid, failure.node)
    if cause is not None and describe_library(failure, cause):
        return f"{who} lost rank {cause.rank}, which had failed"
    return f"{who} raised {_describe_raised(failure.error)}"


def describe_library(failure: Failure, cause: Failure | None) -> str:
    """Return what gloo or NCCL said on a rank that failed because the first one was gone; empty for other failures.

    Args:
        failure: of the rank.
        cause: the first failure; None where it is not known.
    """
    raised = failure.error
    if raised is None or cause is None or cause.rank in (failure.rank, -1) or is_lost_peer(cause):
        return ""  # a cable that is cut is no failure of the first rank
    is_of_torch = raised.type_name in _LOST_PEER_TYPES or (
        raised.type_name == "RuntimeError"
        and any(name in raised.message.lower() for name in ("gloo", "nccl"))
    )
    names_peer = any(text in raised.message for text in (*_LOST_PEER, *_LOST_BY_NCCL))
    return f"{raised.type_name}: {raised.message.strip()}"[:2_000] if is_of_torch and names_peer else ""


def describe_error(error: BaseException) -> str:
    """Return type and text of an exception in a line."""
    return _join(type(error).__name__, _read_text(error))


def _describe_raised(raised: RaisedError) -> str:
    return _join(raised.type_name, raised.message)


def _join(name: str, message: str) -> str:
    first_line = message.strip().split("\n", 1)[0]
    if len(first_line) > 120:
        first_line = first_line[:117] + "..."
    return f"{name}: {first_line}" if first_line else name


def add_note(error: BaseException, note: str) -> None:
    """Add a line below the error's message; Python 3.10 has no notes."""
    if sys.version_info >= (3, 11):
        with contextlib.suppress(Exception):
            error.add_note(note)


def _read_text(error: object) -> str:
    try:
        return str(error)
    except BaseException as broken:  # whatever it raises, the worker is ending
        return f"<its text raised {type(broken).__name__}>"


def _pickle(error: BaseException) -> Pickle | None:
    """Pickle an exception so that it can be made again; None where it cannot.

    Many exceptions take other arguments than they keep in `args`, and fail when they are unpickled; those are
    made without their `__init__`. Attributes that do not pickle are dropped.
    """
    for wrap in (lambda error: error, _Remaker):
        try:
            pickled = pack(wrap(error), to_cpu=True, in_band=True).data
            if type(unpack(pickled, [])).__name__ == type(error).__name__:
                return Pickle(pickled)
        except BaseException:
            continue
    return None


class _Remaker:
    """Pickles as an exception that is made without its `__init__`."""

    def __init__(self, error: BaseException) -> None:
        args = error.args if _is_picklable(error.args) else (_read_text(error),)
        state = {name: value for name, value in error.__dict__.items() if _is_picklable(value)}
        self._parts = type(error), args, state

    def __reduce__(self) -> tuple[object, ...]:
        return _remake, self._parts


def _remake(cls: type[BaseException], args: tuple[object, ...], state: dict[str, object]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _is_picklable(value: object) -> bool:
    try:
        pack(value, to_cpu=True, in_band=True)
    except BaseException:
        return False
    return True


def _unpickle(raised: RaisedError) -> BaseException | None:
    if raised.pickled is None:
        return None
    try:
        error = unpack(raised.pickled, [])
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def forget_variables(error: BaseException | None) -> None:
    """Drop the variables of the frames in the tracebacks of an error and of its causes; their lines stay.

    Args:
        error: any; None has no frames. Frames that still run, and those of generators and coroutines, which may go on,
            keep their variables.
    """
    known = set[int]()
    while error is not None and id(error) not in known:
        known.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not frame.f_code.co_flags & _MAY_GO_ON:
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
                frame.f_locals  # noqa: B018 - before Python 3.13 it may be a copy, which this brings up to date
        error = error.__cause__ or error.__context__


def notes_are_shown() -> bool:
    """Whether tracebacks show the notes of an exception. Python 3.10 and old versions of IPython do not."""
    shown_by = sys.modules.get("IPython.core.ultratb")
    in_python = sys.version_info >= (3, 11)
    return in_python and (shown_by is None or "__notes__" in inspect.getsource(shown_by))


def make_error(failure: Failure, last_words: Sequence[str] | None = None) -> BaseException:
    """Return the exception that a rank raised, or the error for how it ended.

    Args:
        failure: how a rank failed.
        last_words: as for `make_exit_error`.
    """
    if failure.error is None:
        return make_exit_error(failure, last_words)
    return revive(failure.error, failure.rank, failure.pid)
