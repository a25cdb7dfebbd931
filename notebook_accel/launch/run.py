"""Run: the handle of one launch. It runs a job and gives its value, or the error of the rank that failed first."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Literal

from .. import interrupts
from ..errors import LaunchError, RunLeftError, RunStoppedError
from ..events import Event, Failure
from ..stream.record import RunRecord, make_table
from ..stream.sinks import Sink, close_sink
from .callbacks import call_back, start_thread, wait_in_loop
from .checks.problems import check_owner, check_seconds
from .durations import Start, format_duration
from .engines.base import Engine, Outcome
from .job import Job
from .run_errors import build_error, find_first_failure
from .supervise.control import Control
from .transfer import failures

Status = Literal["queued", "starting", "running", "done", "failed", "stopped", "left"]

MakeSink = Callable[["Run"], Sink]
"""Makes the sink that shows a run; it is called in the thread that launches."""

GRACE: Final = 30.0
"""Seconds that workers have to return after they were asked to stop."""
_INTERRUPT_GRACE: Final = 0.0
_SHOWN_LINES: Final = 20
_LOOK_SECONDS: Final = 0.2  # a wait without a timeout can hide an interrupt


class Run:
    """One launch, while it runs and after it has ended.

    `await run`, `run.wait()` and `run.result()` wait for the end. An interrupt of a cell that waits stops the run.

    Args:
        job: what to run.
        engine: starts the processes.
        sinks: make what shows the run.
        start: when it was launched; by default now.

    Attributes:
        job: what runs; once the run has ended, without the function and its arguments.
        record: all events of the run so far.
        started: when it was launched, in seconds since the epoch.
        number: its number among the runs of this process, from 1; 0 if `runs()` does not list it.
        owner: id of the process that made it. In a copy of that process nobody can wait for the run or stop it.
    """

    def __init__(
        self, job: Job, engine: Engine, sinks: Sequence[MakeSink] = (), start: Start | None = None
    ) -> None:
        self.job = job
        self.record = RunRecord()
        self._start = start or Start()
        self.started = self._start.wall
        self.number, self.owner = 0, os.getpid()
        self._engine = engine
        self._control = Control()
        self._outcome: Outcome | None = None
        self._was_popped = False
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._seconds: float | None = None  # in all
        self._begun, self._ended = threading.Event(), threading.Event()
        self._executor: int | None = None
        self._notes: Sequence[str] = ()
        self._callbacks: list[Callable[[], None]] = []
        self._lock, self._taking_up = threading.Lock(), threading.Lock()
        self._sink_makers = tuple(sinks)
        self._sinks: list[Sink] = []

    # -- running it

    def call(self) -> Any:
        """Run the job in this thread and return its value. The run does not keep the value.

        The caller delays interrupts (`interrupts.delay_interrupt`), for `start` too. The waits here obey them.

        Returns:
            What `result` returns.

        Raises:
            BaseException: what `execute` or `result` raises.
            KeyboardInterrupt: the cell was interrupted. All workers have ended.
        """
        __tracebackhide__ = True
        try:
            self.execute()
        except KeyboardInterrupt:
            if self.job.distributed:  # without our own frames
                raise KeyboardInterrupt(self._engine.describe_interrupt(self.job, self.record)) from None
            raise
        value = self.result()
        assert self._outcome is not None
        self._outcome, self._was_popped = replace(self._outcome, values={}), True  # it may be large
        return value

    def execute(self) -> None:
        """Run the job to its end in this thread, and show its output while it runs.

        An exception of a worker is not raised here: `result` raises it.

        Raises:
            BaseException: the job could not start, was interrupted, or ran in this process and raised.
        """
        __tracebackhide__ = True
        self._executor = threading.get_ident()
        try:
            self._outcome = self._engine.run(self.job, self.record, self._deliver, self._control)
            self.record.forget_values()
            if self._outcome.is_bad:
                self._error = self._build_error(self._outcome)
        except BaseException as error:
            is_left = self._control.is_left and isinstance(error, KeyboardInterrupt)
            self._error = RunLeftError(str(error)) if is_left else error
            if isinstance(error, LaunchError) and self.job.distributed:
                # of the package: they would keep workers and what they were sent
                failures.forget_variables(error)
            raise
        finally:
            # a second one would leave the view open, or the run without an end
            with interrupts.delay_interrupt():
                self._close()

    def start(self) -> None:
        """Run the job in a background thread.

        Returns as soon as the engine has copied what the workers need from this process: the function, its arguments
        and the globals that it uses. Later changes in the notebook do not reach the workers.

        Raises:
            BaseException: the job could not start.
            KeyboardInterrupt: the cell was interrupted before that. The run has ended, or was left.
        """
        __tracebackhide__ = True
        try:
            self._open_sinks()  # here: a display belongs to the cell of the thread that makes it
            self._start_thread()
        except BaseException as error:
            self._error = error
            self._close()  # a run that has not ended would keep its devices
            raise
        try:
            while not (self._begun.wait(_LOOK_SECONDS) or self._ended.is_set()):
                interrupts.obey_interrupt()
        except KeyboardInterrupt:
            self.break_off()
            if self.status == "left":
                raise KeyboardInterrupt(str(self._error)) from None
            raise
        if not self._begun.is_set() and self._error is not None:
            raise self._error

    def _start_thread(self) -> None:
        start_thread(self.execute, f"notebook_accel {self.job.name}")  # `result` raises what it raises

    def _close(self) -> None:
        ended = None if self._outcome is None else self._outcome.ended
        self._seconds = self._start.seconds if ended is None else max(0.0, ended - self._start.wall)
        self.job, self.record.is_over = self.job.without_work(), True
        self._traceback = None if self._error is None else self._error.__traceback__
        try:
            for sink in self._sinks:
                close_sink(sink)
        finally:
            with self._lock:
                self._ended.set()
                callbacks, self._callbacks = self._callbacks, []
        call_back(callbacks, self)

    def _open_sinks(self) -> None:
        makers, self._sink_makers = self._sink_makers, ()
        for make in makers:
            self._sinks.append(make(self))  # one by one: if a later one fails, `_close` closes the others

    def _deliver(self, events: Sequence[Event]) -> None:
        if self._sink_makers:  # only now: a run that could not start shows nothing
            self._open_sinks()
        self.record.apply_all(events)
        for sink in self._sinks:
            sink.show(events)
        self._begun.set()

    # -- its state

    @property
    def status(self) -> Status:
        """`queued` on a cluster, `starting` until a worker runs, `running`; at the end `done`, `failed` or `stopped`.

        `stopped` means that somebody asked for it, and no rank failed. `left` is a run that goes on without this
        process.
        """
        if self._seconds is None:
            running = any(phase.name == "running" for phase in self.record.phases.values())
            waits: Status = "queued" if self.record.is_queued else "starting"
            return "running" if running or not self.job.distributed else waits
        if self._control.is_left and isinstance(self._error, RunLeftError):
            return "left"
        if self._error is None:
            known = None if self._outcome is None else self._outcome.was_asked
            return "stopped" if (self._control.stop_is_asked if known is None else known) else "done"
        return "stopped" if isinstance(self._error, (RunStoppedError, KeyboardInterrupt)) else "failed"

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self._ended.is_set()

    @property
    def seconds(self) -> float:
        """How long the run has lasted so far, or lasted in all."""
        return self._start.seconds if self._seconds is None else self._seconds

    @property
    def steps(self) -> int:
        """The largest number of optimizer steps that any rank has made."""
        return max((pulse.steps for pulse in list(self.record.pulses.values())), default=0)

    @property
    def failure(self) -> BaseException | None:
        """The exception that `result` raises. None while the run goes on, and after success."""
        return None if self._seconds is None else self._error

    @property
    def first_failure(self) -> Failure | None:
        """How the rank ended that failed first, on whichever node; None where none failed."""
        return None if self._outcome is None else find_first_failure(self._outcome)

    @property
    def failed_node(self) -> str:
        """The node of that rank, empty where it is this one."""
        return "" if self._outcome is None else self._outcome.where

    @property
    def notes(self) -> Sequence[str]:
        """One line for each rank about what happened to it. Empty if no rank failed."""
        return self._notes

    @property
    def stop_is_asked(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._control.stop_is_asked

    @property
    def stopped_ranks(self) -> frozenset[int]:
        """The ranks whose processes the launcher ended."""
        return frozenset() if self._outcome is None else self._outcome.stopped

    @property
    def metrics(self) -> Any:
        """The metrics that were logged so far, one row for each call: `step`, `time` and the values.

        A pandas DataFrame if pandas is installed, else a list of dicts.
        """
        return make_table(self.record.rows())

    def rank_metrics(self, rank: int | None = None) -> Any:
        """Return the metrics that ranks have logged so far, each its own: as `metrics`, with the `rank` of each row.

        Args:
            rank: whose; None is all ranks. Of over 64 every second, fourth and so on is measured. Of any but the first,
                what comes faster than ten times a second is left out after the first 500 rows. See `lines`.
        """
        return make_table(self.record.rank_rows(rank))

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the last lines of output.

        Args:
            rank: whose lines; None is all ranks. One that an ended run did not have is a ValueError.
        """
        return self.record.lines(rank)

    def show(self) -> None:
        """Show the run in this cell too. The view changes until the run ends, and stays afterwards."""
        shown = [sink.again() for sink in self._sinks]
        if not any(shown):
            print("\n".join([*self.lines()[-_SHOWN_LINES:], repr(self)]))

    def __repr__(self) -> str:
        count, kind = self.job.local_world_size, "process" if self.job.local_world_size == 1 else "processes"
        after = f"{'for' if self._seconds is None else 'after'} {format_duration(self.seconds)}"
        words = [f"{self.job.name} on {count} {kind}: {self.status}", after]
        words += filter(None, [f"{self.steps} steps" if self.steps else "", self._engine.describe_place()])
        if (error := self.failure) is not None and self.status == "failed":
            words.append(failures.describe_error(error))
        return f"<Run {', '.join(words)}>"

    # -- waiting and stopping

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended.

        Args:
            timeout: seconds to wait at most; None waits without a limit.

        Returns:
            Whether the run has ended.

        Raises:
            ValueError, TypeError: `timeout` is not a number of seconds.
            KeyboardInterrupt: the cell was interrupted, and the run was stopped, or left if it goes on without us.
        """
        self._check_owner()
        if timeout is not None:
            check_seconds(float("-inf"), timeout=timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._ended.is_set():
                left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                self._ended.wait(left)
        except KeyboardInterrupt:
            self.break_off()
            if self.status == "left":
                raise KeyboardInterrupt(str(self._error)) from None
            raise
        return True

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end of the run and return its value.

        Args:
            timeout: seconds to wait at most; None waits without a limit.

        Returns:
            What the argument `returns` of the launch asks for: one value, the list of values by rank, or None.

        Raises:
            BaseException: the exception of the rank that failed first.
            WorkerError: the rank that failed first ended without an exception, by a signal for example.
            RunStoppedError: the run was stopped before its workers returned.
            TimeoutError: the run has not ended within `timeout` seconds. It goes on.
            LaunchError: the launch itself has returned the value.
        """
        __tracebackhide__ = True
        if not self.wait(timeout):
            raise TimeoutError(f"{self!r} has not ended within {timeout:g} s")
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # without the frames of earlier calls
        assert self._outcome is not None
        if self._was_popped:
            raise LaunchError(
                f"{self!r} gave its value to the cell that launched it, and has not kept it: "
                "write value = notebook_launcher(...)"
            )
        return self._outcome.choose_value(self.job.returns)

    def forget_variables(self) -> None:
        """Drop the variables in the traceback of its failure: a model or a batch may be among them."""
        if self.is_over and self.failure is not None:
            failures.forget_variables(self.failure)

    def stop(self, grace: float = GRACE) -> None:
        """Stop the run and wait until its workers have ended.

        If the workers use `accelerator.should_stop`, all ranks get True at the same call of it. Then they have `grace`
        seconds to save and return, and what they return is the result. A checkpoint in the background has them too.
        Other workers are ended at once, by SIGTERM, then by SIGKILL. A run that was left is taken up again.

        Args:
            grace: seconds that workers have to return.

        Raises:
            ValueError, TypeError: `grace` is not a number of seconds.
            LaunchError: the run was left, and nothing is known of it any more.
            KeyboardInterrupt: the cell was interrupted during the wait. The remaining workers were ended at once; a run
                that goes on without us was left.
        """
        self.request_stop(grace)
        if threading.get_ident() != self._executor:  # the run's own thread would wait for itself
            self.wait()

    def request_stop(self, grace: float = GRACE) -> None:
        """Ask the run to stop, and do not wait for it.

        Args:
            grace: as for `stop`.

        Raises:
            ValueError, TypeError: `grace` is not a number of seconds.
        """
        self._check_owner()
        check_seconds(grace=grace)
        with self._taking_up, interrupts.delay_interrupt():  # another thread may do so too
            if self.status == "left":
                self._take_up()
        if self._seconds is None:
            self._control.stop(grace)

    def _take_up(self) -> None:
        """Watch a run that was left again, from its beginning, without a view."""
        while not self._ended.wait(_LOOK_SECONDS):  # its view is being closed
            pass
        job, error = self._engine.find_left(self.job), self._error
        self._ended.clear()
        self.job, self.record, self._control = job, RunRecord(), Control()
        self._sinks, self._sink_makers, self._executor, self._outcome = [], (), None, None
        self._seconds = self._error = None
        try:
            self._start_thread()
        except LaunchError:
            self._close()
            self._control.leave()
            self._error = error
            raise

    def break_off(self) -> None:
        """Do what an interrupt does: stop the run at once and wait for that, or leave a run that goes on without us."""
        self.request_break_off()
        if threading.get_ident() != self._executor:
            self.wait()

    def request_break_off(self) -> None:
        """Ask for what `break_off` does, and do not wait for it; for the end of this process."""
        if self._engine.outlives(self.job):
            self._control.leave()
        else:
            self.request_stop(_INTERRUPT_GRACE)

    def end(self, signum: int) -> None:
        """Ask to end all workers by a signal, at once; for a process that is ended by it. May be called by its handler.

        Args:
            signum: the signal; scripts may handle it, and have some time for that.
        """
        self._control.end(signum)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call a function when the run has ended.

        Args:
            callback: called without arguments, in the run's thread; if the run has ended already, at once in this one.
        """
        self._check_owner()
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def _check_owner(self) -> None:
        if not self._ended.is_set():
            check_owner(self.owner, "run", LaunchError)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Any:
        __tracebackhide__ = True
        try:
            await wait_in_loop(self._ended, self.when_ended, _LOOK_SECONDS)
        except BaseException:
            self.break_off()
            raise
        return self.result()

    def _build_error(self, outcome: Outcome) -> BaseException:
        """Return the exception that `result` raises, and tell what happened to each rank where it cannot show that."""
        error, self._notes = build_error(outcome, self.record, self.job.name, self._start)
        if self._notes and not failures.notes_are_shown():
            for sink in self._sinks:
                sink.note("\n".join(self._notes))
        return error
