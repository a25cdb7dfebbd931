"""Run: the live handle of one launch, from a job to its value, or to the error of the rank that failed first."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal

from ..errors import HangError, LaunchError, RunStoppedError
from ..events import Event, Failure
from ..stream.record import RunRecord
from ..stream.sinks import Sink
from . import failures, preflight
from .control import Control
from .engines.base import Engine, Outcome
from .job import Job

Status = Literal["starting", "running", "done", "failed", "stopped"]

MakeSink = Callable[["Run"], Sink]

GRACE: Final = 30.0
"""Seconds that workers have to end of themselves once they were asked to."""
_INTERRUPT_GRACE: Final = 0.0
_SHOWN_LINES: Final = 20
_LOOK_SECONDS: Final = 0.2  # between two looks for an interrupt: waits can hide it


class Run:
    """One launch, while it runs and afterwards.

    `await run`, `run.wait()` and `run.result()` wait for its end; an interrupt of the cell meanwhile stops the run.

    Attributes:
        job: what runs.
        record: everything that it has said.
        started: when it was launched, in seconds since the epoch.
    """

    def __init__(self, job: Job, engine: Engine, sinks: Sequence[MakeSink] = ()) -> None:
        self.job = job
        self.record = RunRecord()
        self.started = time.time()
        self._engine = engine
        self._control = Control()
        self._outcome: Outcome | None = None
        self._is_given = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._finished: float | None = None
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._executor: int | None = None
        self._lines_of_error: Sequence[str] = ()
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._sinks = [make(self) for make in sinks]

    # -- running it

    def execute(self) -> None:
        """Run the job to its end in this thread, and show its output meanwhile.

        Raises:
            BaseException: it could not start, was interrupted, or is a function of this process that raised; what a
                worker raised is raised by `result`.
        """
        __tracebackhide__ = True
        self._executor = threading.get_ident()
        try:
            self._outcome = self._engine.run(self.job, self.record, self._deliver, self._control)
            self.record.forget_values()
            if self._outcome.is_bad:
                self._error = self._told_error(self._outcome)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._close()

    def start(self) -> None:
        """Run the job in a thread; returns when what it needs of this process was taken.

        Raises:
            BaseException: it could not start.
        """
        __tracebackhide__ = True
        thread = threading.Thread(
            target=self._execute_quietly, name=f"notebook_accel {self.job.name}", daemon=True
        )
        thread.start()
        try:
            while not (self._begun.wait(_LOOK_SECONDS) or self._ended.is_set()):
                pass
        except KeyboardInterrupt:
            self.stop(_INTERRUPT_GRACE)
            self._ended.wait()
            raise
        if not self._begun.is_set() and self._error is not None:
            raise self._error

    def _execute_quietly(self) -> None:
        with contextlib.suppress(BaseException):  # `result` raises it
            self.execute()

    def _close(self) -> None:
        self._finished = time.time()
        self._traceback = None if self._error is None else self._error.__traceback__
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # a view that breaks is no failure of the run
                print(f"notebook_accel: the run's output could not be shown: {error!r}", file=sys.stderr)
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception as error:  # the others wait for their call
                print(
                    f"notebook_accel: {callback!r} failed at the end of {self!r}: {error!r}", file=sys.stderr
                )

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self.record.apply(event)
        for sink in self._sinks:
            sink.show(events)
        if not self._begun.is_set():
            self._begun.set()

    # -- how it stands

    @property
    def status(self) -> Status:
        """How the run stands: `starting` until a worker runs; `stopped` where that was asked for and no rank failed."""
        if self._finished is None:
            running = any(phase.name == "running" for phase in self.record.phases.values())
            return "running" if running or not self.job.distributed else "starting"
        if self._error is None:
            return "stopped" if self._control.stop_is_asked else "done"
        return "stopped" if isinstance(self._error, (RunStoppedError, KeyboardInterrupt)) else "failed"

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    @property
    def seconds(self) -> float:
        """How long it has been running, or ran."""
        return (self._finished or time.time()) - self.started

    @property
    def steps(self) -> int:
        """Optimizer steps of the rank that has made most."""
        return max((pulse.steps for pulse in list(self.record.pulses.values())), default=0)

    @property
    def failure(self) -> BaseException | None:
        """What `result` raises, None while it runs and where it raises nothing."""
        return None if self._finished is None else self._error

    @property
    def notes(self) -> Sequence[str]:
        """What happened to each rank, a line each, where one failed."""
        return self._lines_of_error

    @property
    def stop_is_asked(self) -> bool:
        """Whether somebody asked it to stop."""
        return self._control.stop_is_asked

    @property
    def stopped_ranks(self) -> frozenset[int]:
        """The ranks that the launcher ended."""
        return frozenset() if self._outcome is None else self._outcome.stopped

    @property
    def metrics(self) -> Any:
        """What was logged so far, a row for each call: a DataFrame where pandas is installed, else a list of dicts."""
        rows = self.record.rows()
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the last lines of one rank, or of all."""
        return self.record.lines(rank)

    def show(self) -> None:
        """Draw the run in this cell, live until it has ended; as often as wanted, and afterwards too."""
        shown = [sink.again() for sink in self._sinks]
        if not any(shown):
            print("\n".join([*self.lines()[-_SHOWN_LINES:], repr(self)]))

    def __repr__(self) -> str:
        count, kind = self.job.local_world_size, "process" if self.job.local_world_size == 1 else "processes"
        words = [f"{self.job.name} on {count} {kind}: {self.status}"]
        words.append(f"{'for' if self._finished is None else 'after'} {spoken(self.seconds)}")
        if self.steps:
            words.append(f"{self.steps} steps")
        if (error := self.failure) is not None and self.status == "failed":
            words.append(failures.title(error))
        return f"<Run {', '.join(words)}>"

    # -- waiting and stopping

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, `timeout` seconds at most; return whether it has ended.

        Raises:
            ValueError, TypeError: `timeout` is no number of seconds.
            KeyboardInterrupt: the cell was interrupted; the run was stopped.
        """
        if timeout is not None:
            preflight.check_seconds(float("-inf"), timeout=timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._ended.is_set():
                left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._ended.wait(left)
        except KeyboardInterrupt:
            self.stop(_INTERRUPT_GRACE)
            raise
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and return what the launch returns.

        Raises:
            BaseException: the first failing rank's own exception, or a WorkerError where it ended without one.
            RunStoppedError: the run was stopped before its workers returned.
            TimeoutError: it has not ended within `timeout` seconds; it goes on.
            LaunchError: the cell that launched it waited for its value and has it.
        """
        __tracebackhide__ = True
        if not self.wait(timeout):
            raise TimeoutError(f"{self!r} has not ended within {timeout:g} s")
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # without those who raised it before
        assert self._outcome is not None
        if self._is_given:
            raise LaunchError(
                f"{self!r} gave its value to the cell that launched it, and keeps none: value = notebook_launcher(...)"
            )
        values = self._outcome.values
        if self.job.returns == "all":
            return [values.get(rank) for rank in sorted(values)]
        if self.job.returns == "first":
            return values[min(values)]
        return None

    def give(self) -> Any:
        """Return what `result` does, and keep nothing of it: a value may be large, and ended runs are kept."""
        __tracebackhide__ = True
        value = self.result()
        assert self._outcome is not None
        self._outcome, self._is_given = replace(self._outcome, values={}), True
        return value

    def stop(self, grace: float = GRACE) -> None:
        """Stop the run and wait until its workers have ended.

        Workers that ask `accelerator.should_stop` are told yes, all at the same question, and have `grace` seconds
        to save and return: what they return is the result. Others are ended at once, by SIGTERM and then SIGKILL. A
        run that has ended stays as it is.

        Raises:
            ValueError, TypeError: `grace` is no number of seconds.
            KeyboardInterrupt: the cell was interrupted meanwhile; what still ran was ended at once.
        """
        self.request_stop(grace)
        if threading.get_ident() != self._executor:  # the run's own thread would wait for itself
            self.wait()

    def request_stop(self, grace: float = GRACE) -> None:
        """Ask for a stop, as `stop` does, without waiting for it."""
        preflight.check_seconds(grace=grace)
        if self._finished is None:
            self._control.stop(grace)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call a function when the run has ended, in the run's thread; at once where it has."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        __tracebackhide__ = True
        ended = asyncio.get_running_loop().create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                ended.get_loop().call_soon_threadsafe(ended.set_result, None)

        self.when_ended(wake)
        try:
            while not ended.done():  # ipykernel's loop sees an interrupt when something else wakes it
                await asyncio.wait([ended], timeout=_LOOK_SECONDS)
        except BaseException:
            self.stop(_INTERRUPT_GRACE)
            raise
        return self.result()

    # -- its error

    def _told_error(self, outcome: Outcome) -> BaseException:
        """Return the exception of the rank that failed first, with a line for each other rank."""
        if outcome.error is not None:
            return outcome.error
        if outcome.hang:
            return HangError(outcome.hang)
        if not outcome.failures and outcome.cause is None:
            return RunStoppedError(f"{self.job.name} was stopped after {spoken(self.seconds)}")
        cause = outcome.cause or failures.first(outcome.failures)
        if cause.error is not None:
            error = failures.revive(cause.error, cause.rank, cause.pid)
        else:
            error = failures.silent_end(cause)
        notes = self._lines_of_error = self._notes(cause, outcome)
        for note in notes:
            failures.add_note(error, note)
        if not notes_are_shown():
            for sink in self._sinks:
                sink.note("\n".join(notes))
        return error

    def _notes(self, cause: Failure, outcome: Outcome) -> list[str]:
        after = max(0.0, cause.time - self.started)
        notes = []
        if cause.error is not None:
            where = f" on {outcome.where}" if outcome.where else ""
            notes.append(f"rank {cause.rank} (process {cause.pid}){where} raised this after {after:.1f} s")
        others = {
            failure.rank: failures.one_line(failure) for failure in outcome.failures if failure is not cause
        }
        for rank in outcome.stopped - others.keys() - {cause.rank}:
            others[rank] = f"rank {rank} was stopped by the launcher"
        return notes + [others[rank] for rank in sorted(others)]


def spoken(seconds: float) -> str:
    """Return a duration as people say it: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def notes_are_shown() -> bool:
    """Whether a traceback shows an exception's notes: on Python 3.10, and in old versions of IPython, it does not."""
    shown_by = sys.modules.get("IPython.core.ultratb")
    in_python = sys.version_info >= (3, 11)
    return in_python and (shown_by is None or "__notes__" in inspect.getsource(shown_by))
