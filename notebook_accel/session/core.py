"""Session: worker processes that stay, joined in a process group, and make calls one after the other."""

from __future__ import annotations

import keyword
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from .. import devices
from ..errors import RunStoppedError, SessionError
from ..events import Failure
from ..launch import failures, hang, preflight, registry, signals
from ..launch.culprit import pack_call, unpack_value
from ..launch.job import RETURNS, Job, Returns, StartMethod
from ..launch.run import notes_are_shown, spoken
from ..stream.sinks import Output, Sink, TextSink
from . import cells, service
from .call import Call
from .workers import Workers, killed_line, quiet_phases

if TYPE_CHECKING:
    from ..config.launch import Source

CPU_PROCESSES: Final = 2
Status = Literal["idle", "busy", "dead", "closed"]
Ranks = int | Collection[int] | Literal["all"]
_ANEW: Final = (
    "the process group was made anew, because ranks may disagree about the last one: "
    "models that DistributedDataParallel wrapped before must be prepared again"
)


class Session:
    """Worker processes that stay: functions run on them without starting anything again.

    They are joined in a process group, as in a launch; `PartialState` is made on each. A call that fails or is
    interrupted leaves the session usable. A with statement closes it, and so does the end of this process, or of the
    last reference to it. Functions do not open a process group, it is there.

    Args:
        num_processes: None is one per GPU, or 2 on a machine without one.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`: what an `Accelerator` in the workers uses.
        start_method: `fork`, `forkserver`, `spawn`, or `auto`, as in `notebook_launcher`.
        output: ranks whose output is shown: `all`, `first`, `none` or a collection of ranks.
        environment: variables of the workers alone.
        config: as in `notebook_launcher`; what several nodes need is refused.
        hang_timeout: seconds after which is told which ranks wait in a collective that others have not entered; None
            never tells.
        grace: seconds that the other ranks have to end by themselves after one has failed.
        log_line_prefix_template: text before each line; `${rank}`, `${local_rank}` and `${role_name}` are filled in.

    Raises:
        ValueError, TypeError: wrong arguments, all in one message.
        LaunchError: the workers cannot start, or another run or session holds the devices.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        mixed_precision: str = "no",
        start_method: StartMethod = "auto",
        output: Output = "all",
        environment: Mapping[str, str] | None = None,
        config: Source | None = None,
        hang_timeout: float | None = 300.0,
        grace: float = 1.0,
        log_line_prefix_template: str | None = None,
    ) -> None:
        __tracebackhide__ = True
        preflight.check_environment(environment or {}, "Session")
        job = Job(
            function=service.join,
            num_processes=num_processes,
            mixed_precision=mixed_precision,
            start_method=start_method,
            output=output,
            prefix=log_line_prefix_template,
            environment=dict(environment or {}),
            quiet=True,
            serve=service.serve,
        )
        if config is not None:
            job = _configured(job, config)
        preflight.check_seconds(grace=grace)
        if hang_timeout is not None:
            preflight.check_seconds(1e-3, hang_timeout=hang_timeout)
        if job.num_processes is None and job.device_kind is devices.CPU:
            job = replace(job, num_processes=CPU_PROCESSES)
        self.job = registry.settled(preflight.checked(job, "Session"))
        self.hang_timeout = hang_timeout
        self.grace = grace
        self.started = time.time()
        self._held: list[Workers] = []
        weakref.finalize(self, _close_all, self._held)
        self._start()
        registry.add_session(self)

    def _start(self) -> None:
        __tracebackhide__ = True
        workers = Workers(self.job)
        self._held[:] = [workers]
        workers.start()
        try:
            self._call(service.join, (), name="the start of the session", returns="none")
        except BaseException:
            workers.close()
            raise

    @property
    def _workers(self) -> Workers:
        return self._held[0]

    # -- calls

    def run(
        self, function: Callable[..., Any], /, *args: Any, returns: Returns = "first", **kwargs: Any
    ) -> Any:
        """Call `function(*args, **kwargs)` on every rank and return rank 0's value, or what `returns` asks for.

        The function sees the notebook's globals as they are now, as in a launch; names that the notebook lacks are
        the worker's variables. What it assigns by `global` stays on the worker.

        Args:
            function: may be defined in a cell.
            args: its arguments.
            returns: `first`, `all` for the list by rank, or `none`. Tensors arrive on the CPU.
            kwargs: its arguments by name.

        Raises:
            SessionError: the session is closed, busy, or has lost a worker.
            ShipError: the function or its value cannot be sent; the message says because of what.
            BaseException: the exception of the first rank that failed.
            KeyboardInterrupt: the call was stopped on all ranks; the session goes on.
        """
        __tracebackhide__ = True
        if returns not in RETURNS:
            raise ValueError(f"returns={returns!r}: legal are {', '.join(map(repr, RETURNS))}")
        preflight.check_call(function, args, kwargs, "Session.run")
        values = self._call(function, args, kwargs, returns=returns)
        if returns == "all":
            return [values[rank] for rank in sorted(values)]
        return values[0] if returns == "first" else None

    def push(self, values: Mapping[str, Any] | None = None, /, *, ranks: Ranks = "all", **named: Any) -> None:
        """Make variables on the workers: `push(x=1)`, or `push({"x": 1}, ranks=0)`."""
        __tracebackhide__ = True
        if values is not None and not isinstance(values, Mapping):
            raise TypeError(f"push takes values by name, as {{'x': 1}} or x=1, not {values!r}")
        given = {**(values or {}), **named}
        wrong = [name for name in given if not _is_name(name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name of a variable")
        self._call(service.push, (given,), name="push", ranks=ranks, returns="none")

    def pull(self, name: str, rank: int | Literal["all"] = 0) -> Any:
        """Return a variable of one rank, or the list of all ranks'; NameError where there is none of that name."""
        __tracebackhide__ = True
        values = self._call(service.pull, (name,), name="pull", ranks=rank, returns="all")
        return [values[each] for each in sorted(values)] if rank == "all" else values[self._ranks(rank)[0]]

    def execute(self, code: str, ranks: Ranks = "all", *, filename: str = "<session>") -> None:
        """Run code in the variables of the workers, and show the value of its last expression by rank.

        Args:
            code: Python source; `filename` is what tracebacks name it.
            ranks: that run it.
            filename: of a cell, where it is one.

        Raises:
            TypeError: the code is no text.
            BaseException: what `run` raises.
        """
        __tracebackhide__ = True
        if not isinstance(code, str):
            raise TypeError(f"code={code!r}: text is needed; `run` takes a function")
        self._call(cells.execute, (code, filename), name="the cell", ranks=ranks, returns="none")

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        returns: Returns,
        ranks: Ranks = "all",
        name: str = "",
    ) -> dict[int, Any]:
        """Make a call and return the values of the ranks that send one."""
        __tracebackhide__ = True
        chosen = self._ranks(ranks)
        self._check_usable()
        workers = self._workers
        name = name or getattr(function, "__qualname__", None) or type(function).__name__
        parcel = pack_call(function, args, dict(kwargs or {}), name)
        sending = {"first": chosen[:1], "all": chosen, "none": []}[returns]
        sink = TextSink(self.job.output, self.job.prefix)
        sink.show(quiet_phases(range(self.num_processes)))
        _tell_late_lines(workers, sink)
        try:
            call = workers.begin(parcel, name, chosen, sending, self.grace, self.hang_timeout)
            while call.left or call.waiting:
                workers.show(call, sink)
            with signals.interrupt_held():
                notes = self._ended(call, sink)
                sink.close()
        except BaseException as error:
            self._stop_call(sink, error, name)
            raise
        if call.failures or call.was_interrupted:
            raise self._error(call, notes, sink)
        return {rank: unpack_value(call.results[rank]) for rank in sending}

    def _stop_call(self, sink: Sink, error: BaseException, name: str) -> None:
        """Bring all ranks back after an interrupt, or after output could not be shown."""
        workers = self._workers
        call = workers.current
        if call is None or call.owner != threading.get_ident() or isinstance(error, SessionError):
            return
        if not isinstance(error, KeyboardInterrupt):
            sink = TextSink("none")  # the other one cannot show anything
        with signals.interrupt_held():
            call.bring_back(0.0)
            while call.left:
                workers.show(call, sink)
            for note in self._ended(call, sink):
                sink.note(note)
            sink.close()
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(f"{name}: stopped on all ranks, the session goes on") from None

    def _ended(self, call: Call, sink: Sink) -> list[str]:
        """Make the session ready for the next call; return what is to be told about it."""
        workers = self._workers
        workers.calls += 1
        anew = workers.needs_group(call)
        workers.end(call)
        if workers.dead:
            return ["session.restart() starts new workers, without their variables"]
        if not anew:
            return []
        try:
            workers.make_group_anew(sink)
        except SessionError as error:
            return [str(error)]
        return [_ANEW] if call.failures else []

    def _error(self, call: Call, more: list[str], sink: Sink) -> BaseException:
        """Return the exception of the rank that failed first, with a line for each other rank."""
        own = [failure for rank, failure in call.failures.items() if rank not in call.told]
        if not own and call.was_interrupted:
            notes = [_told_line(failure) for failure in call.failures.values()]
            error: BaseException = RunStoppedError(f"{call.name} was stopped, the session goes on")
        else:
            cause = failures.first(own or list(call.failures.values()))
            error = _revived(cause)
            after = max(0.0, cause.time - call.begun)
            notes = (
                [f"rank {cause.rank} (process {cause.pid}) raised this after {after:.1f} s"]
                if cause.error
                else []
            )
            for rank in sorted(call.failures.keys() - {cause.rank}):
                failure = call.failures[rank]
                notes.append(_told_line(failure) if rank in call.told else failures.one_line(failure))
        for note in [*notes, *more]:
            failures.add_note(error, note)
        if not notes_are_shown():
            sink.note("\n".join([*notes, *more]))
        return error

    # -- its life

    def stop(self, grace: float = 30.0) -> None:
        """Stop the call that runs, from another thread: the session goes on.

        Ranks that ask `accelerator.should_stop` are told yes, all at the same question, and have `grace` seconds to
        return; others are interrupted at once. Without a call nothing happens.

        Raises:
            ValueError, TypeError: `grace` is no number of seconds.
        """
        preflight.check_seconds(grace=grace)
        call = None if self.is_over else self._workers.current
        if call is not None:
            call.stop(grace)

    def restart(self) -> None:
        """End all workers and start new ones; their variables are lost.

        Raises:
            SessionError: the session is closed.
        """
        __tracebackhide__ = True
        if self.is_over:
            raise SessionError("the session is closed: make a new one")
        self._workers.close()
        self._start()

    def close(self) -> None:
        """End the workers; a second time nothing happens."""
        _close_all(self._held)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- how it stands

    @property
    def num_processes(self) -> int:
        """Number of workers."""
        return self.job.local_world_size

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""
        pids = self._workers.pids
        return [pids[rank] for rank in sorted(pids)]

    @property
    def is_over(self) -> bool:
        """Whether it is closed."""
        return self._workers.is_over

    def filenos(self) -> list[int]:
        """Return the descriptors that workers of others, forked from this process, must not keep."""
        return self._workers.filenos()

    @property
    def status(self) -> Status:
        """`idle`, `busy` with a call, `dead` where it takes none before a restart, or `closed`."""
        workers = self._workers
        if workers.is_over:
            return "closed"
        if workers.dead or workers.broken:
            return "dead"
        return "busy" if workers.current is not None else "idle"

    @property
    def calls(self) -> int:
        """How many calls the workers have made since they were started."""
        return max(0, self._workers.calls - 1)  # without the one that joined them

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the last lines of output of one rank, or of all, also those that came between calls."""
        return self._workers.lines(rank)

    def __repr__(self) -> str:
        status, workers = self.status, self._workers
        kind = "process" if self.num_processes == 1 else "processes"
        words = [f"{self.num_processes} {kind}: {status}"]
        if status == "busy" and (call := workers.current) is not None:
            words = [f"{words[0]} with {call.name} for {spoken(call.seconds)}"]
        if status == "dead":
            words += [workers.broken] if workers.broken else []
            words += workers.causes()
            words.append("restart() starts new workers")
        if status in ("idle", "busy"):
            words.append(f"{self.calls} {'call' if self.calls == 1 else 'calls'} so far")
            words += [f"pids {', '.join(map(str, self.pids))}"]
        return f"<Session of {', '.join(words)}>"

    def _check_usable(self) -> None:
        __tracebackhide__ = True
        workers = self._workers
        if workers.is_over:
            raise SessionError("the session is closed: make a new one")
        if workers.broken:
            raise SessionError(
                f"{workers.broken}: session.restart() starts new workers, without their variables"
            )
        if workers.dead:
            causes = "; ".join(workers.causes())
            raise SessionError(f"{causes}. session.restart() starts new workers, without their variables")

    def _ranks(self, ranks: Ranks) -> list[int]:
        """Return the ranks that are meant, in order."""
        __tracebackhide__ = True
        everyone = range(self.num_processes)
        if isinstance(ranks, str):
            chosen: Iterable[Any] = everyone if ranks == "all" else [ranks]
        else:
            chosen = ranks if isinstance(ranks, Iterable) else [ranks]
        found = list(chosen)
        if not found or not all(type(rank) is int and rank in everyone for rank in found):
            raise ValueError(f"ranks={ranks!r}: the ranks of this session are 0 to {self.num_processes - 1}")
        return sorted(set(found))


def current_session() -> Session | None:
    """Return the session that `%%distributed` uses, the last one made that is not closed; None without one."""
    living: list[Session] = registry.sessions()
    return living[-1] if living else None


def _close_all(held: list[Workers]) -> None:
    for workers in held:
        workers.close()


def _configured(job: Job, config: Source) -> Job:
    """Return the job with what a config says and the call does not."""
    __tracebackhide__ = True
    from ..config import launch as by_config

    default = Job(function=service.join)
    given = [
        name for name in ("num_processes", "mixed_precision") if getattr(job, name) != getattr(default, name)
    ]
    found = by_config.arguments(by_config.found(config), given)
    if found.values["num_nodes"] > 1:
        raise ValueError(f"config names {found.values['num_nodes']} nodes: a session is on one")
    chosen = {
        name: found.values[name] for name in ("num_processes", "mixed_precision") if name in found.values
    }
    return replace(job, **chosen, environment={**found.environment, **job.environment})


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def _tell_late_lines(workers: Workers, sink: Sink) -> None:
    if workers.late_lines:
        count = workers.late_lines
        sink.note(
            f"{count} {'line' if count == 1 else 'lines'} came between the calls: session.lines() has them"
        )


def _revived(cause: Failure) -> BaseException:
    if cause.error is None:
        return failures.silent_end(cause)
    return failures.revive(cause.error, cause.rank, cause.pid)


def _told_line(failure: Failure) -> str:
    """Say where a rank was that had to be brought back, or that it did not come back."""
    if failure.error is None:
        return killed_line(failure)
    frame = hang.place_of_error(failure.error)
    place = f" in {hang.spot(frame)}" if frame is not None else ""
    return f"rank {failure.rank} (process {failure.pid}) was stopped{place}"
