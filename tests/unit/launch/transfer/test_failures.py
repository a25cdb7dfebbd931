"""A worker's exception on its way to the notebook."""

from __future__ import annotations

import signal
import socket
import sys
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed import DistBackendError

from notebook_accel.errors import NotebookAccelError, WorkerError, WorkerExitedError, WorkerKilledError
from notebook_accel.events import Failure, Frame, RaisedError
from notebook_accel.launch import signals
from notebook_accel.launch.transfer import failures
from notebook_accel.stream.emit import Emitter
from notebook_accel.stream.wire import FrameReader


class Picky(Exception):
    """Takes other arguments than it keeps."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason}!")
        self.code = code


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return failures.revive(failures.describe(caught), rank=0, pid=1)


def test_type_text_attributes_and_notes_survive() -> None:
    error = Picky(4, reason="no")
    if sys.version_info >= (3, 11):
        error.add_note("a note")
    back = _raised(error)
    assert type(back) is Picky and str(back) == "no!" and back.code == 4
    if sys.version_info >= (3, 11):
        assert back.__notes__ == ["a note"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(2, "No such file", "name"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
        KeyError("k"),
        StopIteration(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_standard_exceptions(error: Exception) -> None:
    back = _raised(error)
    assert type(back) is type(error) and str(back) == str(error) and repr(back.args) == repr(error.args)


def test_the_traceback_has_the_workers_lines_and_columns() -> None:
    def inner() -> None:
        value = {"a": 1}
        print(value["a"] + value["b"])

    try:
        inner()
    except KeyError as error:
        original = traceback.format_exception(error)
        back = failures.revive(failures.describe(error), rank=0, pid=1)
    assert traceback.format_exception(back) == original


def test_a_call_over_several_lines() -> None:
    try:
        int(
            "x",
            base=10,
        )
    except ValueError as error:
        original = traceback.format_exception(error)
        back = failures.revive(failures.describe(error), rank=0, pid=1)
    assert traceback.format_exception(back) == original


def test_the_chain_of_causes() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from error
    except ValueError as error:
        back = failures.revive(failures.describe(error), rank=0, pid=1)
    assert isinstance(back.__cause__, KeyError)
    assert back.__cause__.__traceback__ is not None


def _failure(rank: int, time: float, error: BaseException | None = None, exitcode: int = 1) -> Failure:
    raised = failures.describe(error) if error is not None else None
    return Failure(rank=rank, time=time, pid=10 + rank, error=raised, exitcode=exitcode)


def test_the_first_by_time_is_the_cause() -> None:
    late, early = _failure(0, 2.0, ValueError()), _failure(1, 1.0, KeyError())
    assert failures.find_first([late, early]) is early


def test_a_clock_that_jumped_does_not_choose_the_cause() -> None:
    late, early = replace(_failure(0, 1.0), moment=50.0), replace(_failure(1, 9e6), moment=49.0)
    assert failures.find_first([late, early]) is early
    elsewhere = _failure(2, 2.0)  # the clock of another machine says nothing of this one's
    assert failures.find_first([late, early, elsewhere]) is late


def test_exceptions_that_lead_to_themselves_are_described_once() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__ = first.__context__ = second
    second.__cause__, second.__context__ = first, OSError("third")
    described = failures.describe(first)
    assert described.cause is not None and described.context is None
    assert described.cause.cause is None and described.cause.context is not None


def test_a_killed_rank_comes_before_its_peers_lost_connection() -> None:
    lost = _failure(0, 1.0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    killed = _failure(1, 1.1, exitcode=-9)
    assert failures.find_first([lost, killed]) is killed
    other = _failure(0, 1.0, ValueError("unrelated"))
    assert failures.find_first([other, killed]) is other


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError("[gloo/pair.cc] Connection closed by peer [127.0.0.1]:1"),
            "lost rank 1, which had failed",
        ),
        (
            DistBackendError("NCCL error: remote process exited or there was a network error"),
            "lost rank 1, which had failed",
        ),
        (RuntimeError("download: Connection refused"), "raised RuntimeError: download: Connection refused"),
        (RuntimeError("shapes differ"), "raised RuntimeError: shapes differ"),
        (BrokenPipeError(32, "Broken pipe"), "raised BrokenPipeError: [Errno 32] Broken pipe"),
    ],
)
def test_a_rank_that_lost_the_first_one_says_so(error: Exception, text: str) -> None:
    first, second = _failure(1, 1.0, ValueError("bad")), _failure(0, 2.0, error)
    assert failures.describe_failure(second, first) == f"rank 0 (process 10) {text}"
    lost = text.startswith("lost")
    assert failures.describe_library(second, first) == (f"{type(error).__name__}: {error}" if lost else "")
    cut = _failure(1, 1.0, RuntimeError("[gloo] Connection timed out"))
    for cause in (None, second, cut, replace(first, rank=-1)):  # nobody else was the first
        assert failures.describe_failure(second, cause).startswith("rank 0 (process 10) raised ")
    ended = _failure(0, 2.0, exitcode=3)
    assert failures.describe_failure(ended, first) == failures.describe_failure(ended)


def _noticed(rank: int, moment: float, *, alive: float, exitcode: int) -> Failure:
    return replace(_failure(rank, moment, exitcode=exitcode), moment=moment, alive=alive)


def test_an_end_that_is_noticed_late_comes_before_what_followed_from_it() -> None:
    """Where this process stood still, an end may have been at any time since it last looked."""
    lost = _failure(0, 5.0, RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"))
    lost = replace(lost, moment=5.0)
    killed = _noticed(1, 60.0, alive=4.0, exitcode=-9)
    assert failures.find_first([lost, killed]) is killed
    later = _noticed(1, 60.0, alive=50.0, exitcode=-9)
    assert failures.find_first([lost, later]) is lost
    raised = replace(_failure(0, 5.0, ValueError("unrelated")), moment=5.0)
    assert failures.find_first([raised, killed]) is raised


def test_of_ends_that_are_noticed_together_a_kill_is_the_first() -> None:
    left = _noticed(0, 60.0, alive=4.0, exitcode=1)
    aborted = _noticed(1, 60.1, alive=4.0, exitcode=-signal.SIGABRT)
    killed = _noticed(2, 60.2, alive=4.0, exitcode=-9)
    assert failures.find_first([left, aborted, killed]) is killed
    crashed = _noticed(
        2, 60.2, alive=60.0, exitcode=-11
    )  # it was alive when the other was looked at for the last time
    assert failures.find_first([left, crashed]) is left
    after = _noticed(2, 60.2, alive=60.15, exitcode=-9)
    assert failures.find_first([left, after]) is left


@pytest.mark.parametrize("number", [s for s in signal.Signals if s.name in signals.CAUSES])
def test_every_signal_is_named_with_its_cause(number: int) -> None:
    error = failures.make_exit_error(_failure(2, 0.0, exitcode=-number))
    assert isinstance(error, WorkerKilledError) and error.signum == number and error.rank == 2
    assert signal.Signals(number).name in str(error) and signals.likely_cause(number) in str(error)


def test_exit_codes() -> None:
    error = failures.make_exit_error(_failure(0, 0.0, exitcode=7))
    assert isinstance(error, WorkerExitedError) and error.exitcode == 7 and "exit code 7" in str(error)
    assert isinstance(error, WorkerError) and isinstance(error, NotebookAccelError)
    back = _raised(error)
    assert type(back) is WorkerExitedError and back.exitcode == 7


@pytest.mark.parametrize("way", ["__str__", "__reduce__", "__getattribute__"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_error_whose_description_raises_keeps_its_name_and_place(
    way: str, kind: type[BaseException]
) -> None:
    def broken(*args: object) -> None:
        raise kind

    odd = type("Odd", (ValueError,), {way: broken})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            raise odd("text")
        except odd as error:
            failures.report(Emitter(theirs, rank=0), error)
        (event,) = FrameReader().feed(ours.recv(100_000))
    assert isinstance(event, Failure) and event.error is not None
    assert event.error.type_name == "Odd"
    assert (
        event.error.frames[-1].name
        == test_an_error_whose_description_raises_keeps_its_name_and_place.__name__
    )


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the cause"),
        KeyError("a key"),
        FileNotFoundError(2, "No such file or directory", "a.txt"),
        RuntimeError(),
        ZeroDivisionError("division by zero"),
        AssertionError(["a list"]),
    ],
)
def test_without_a_pickle_an_exception_of_python_comes_by_its_name(error: Exception) -> None:
    """So it does from a node that proves no secret."""
    back = failures.revive(replace(failures.describe(error), pickled=None), rank=1, pid=2)
    assert type(back) is type(error) and str(back) == str(error)


def test_without_a_pickle_others_come_as_text() -> None:
    class ValueError(Exception):
        """Of the same name as Python's."""

    ValueError.__qualname__ = "ValueError"
    for error in (ValueError("of my own"), SystemExit(3), KeyboardInterrupt("x")):
        described = replace(failures.describe(error), pickled=None)
        back = failures.revive(described, rank=1, pid=2)
        assert type(back) is WorkerError and str(back) == f"{described.type_name}: {error}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups of exceptions")
def test_the_parts_of_a_group_have_their_lines() -> None:
    def fail() -> None:
        raise KeyError("two")

    try:
        fail()
    except KeyError as error:
        part = error
    back = _raised(ExceptionGroup("several", [ValueError("one"), part]))  # noqa: F821
    assert [repr(each) for each in back.exceptions] == ["ValueError('one')", "KeyError('two')"]  # type: ignore[attr-defined]
    assert traceback.extract_tb(back.exceptions[1].__traceback__)[-1].name == "fail"  # type: ignore[attr-defined]


def test_frames_that_a_stranger_made_up_do_no_harm() -> None:
    frames = [
        Frame(filename=name, lineno=line, first_lineno=first, name="f", qualname="f", columns=columns)
        for name in ("a.py", "a\0b")
        for line, first in ((1, 1), (1 << 62, 1), (-5, 1 << 62), (0, -(1 << 62)))
        for columns in (None, (1 << 62, -3, 1 << 62))
    ]
    raised = RaisedError(type_name="ValueError", message="x", pickled=None, frames=frames, arguments=["x"])
    back = failures.revive(raised, rank=1, pid=2)
    assert "ValueError: x" in "".join(traceback.format_exception(back))


class Big:
    """What a frame holds."""


def test_variables_of_frames_that_ended_are_dropped_and_of_generators_kept() -> None:
    dropped: list[weakref.ref[Big]] = []

    def fail() -> None:
        big = Big()
        dropped.append(weakref.ref(big))
        raise KeyError("first")

    def read() -> Iterator[int]:
        big = Big()
        dropped.append(weakref.ref(big))
        yield 1
        fail()

    def go_on(errors: list[BaseException]) -> Iterator[Big]:
        big = Big()
        try:
            raise ValueError("held")
        except ValueError as error:
            errors.append(error)
        yield big
        yield big

    held: list[BaseException] = []
    other = go_on(held)
    big = next(other)
    try:
        try:
            list(read())
        except KeyError as error:
            raise held[0] from error
    except ValueError as error:
        kept = error
    assert [ref() is None for ref in dropped] == [False, False]
    failures.forget_variables(kept)
    assert [ref() is None for ref in dropped] == [False, True]
    assert next(other) is big
    assert "big = Big()" not in "".join(traceback.format_exception(kept))
    assert 'raise KeyError("first")' in "".join(traceback.format_exception(kept)), "the lines stay"
