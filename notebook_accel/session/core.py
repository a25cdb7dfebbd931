"""Session: worker processes that stay, and run one call after the other in one process group."""

from __future__ import annotations

import keyword
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from .. import devices, environ, interrupts
from ..config import arguments
from ..config.argument_checks import check_environment
from ..config.launch_options import Returns, StartMethod
from ..errors import SessionError
from ..events import Phase
from ..launch import preflight, registry
from ..launch.checks.problems import check_owner, check_seconds, raise_all
from ..launch.durations import format_duration
from ..launch.engines.base import Engine
from ..launch.request import LaunchRequest
from ..launch.transfer import failures
from ..launch.transfer.unpicklable import pack_call, unpack_value
from ..stream.sinks import Output, Sink, TextSink
from . import cells, service
from .call import Call
from .workers import RESTART, Workers

if TYPE_CHECKING:
    from ..config.launch import Source

_CPU_PROCESSES: Final = 2
Status = Literal["idle", "busy", "dead", "closed"]
Ranks = int | Collection[int] | Literal["all"]


class Session:
    """Worker processes that stay, so that functions run on them without a new start.

    The workers are joined in a process group, as in a launch, and each has a `PartialState`. So functions must not open
    a process group. A session can still be used after a call that failed or was interrupted. It closes at the end of
    its `with` statement, at the end of this process, and when nothing refers to it any more.

    Args:
        num_processes: number of workers. None is one for each GPU, or 2 on a machine without a GPU; on hosts and
            clusters as in `notebook_launcher`.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`. An `Accelerator` in the workers uses it.
        start_method: `auto`, `fork` or `fresh`, as in `notebook_launcher`.
        output: ranks whose output is shown: `all`, `first`, `none` or a collection of ranks.
        environment: environment variables that only the workers get.
        config: as in `notebook_launcher`: what it says counts where the argument is left at its default.
        hang_timeout: seconds without any sign of progress of a call, after which a report says where each rank is; see
            `notebook_launcher`. None never reports.
        grace: seconds that the other ranks have to return after one has failed. Then they are interrupted.
        log_line_prefix_template: `string.Template` of the text before each line of output. It may contain `${rank}`,
            `${local_rank}` and `${role_name}`.
        hosts: where the workers run, as in `notebook_launcher`; None is this machine.
        python: the Python on the hosts, as in `notebook_launcher`.
        slurm, num_nodes, slurm_keep: what a job of SLURM asks for, as in `notebook_launcher`.
        engine: `auto`, `ssh`, `slurm`, `ray`, or an engine of these.
        address: of the Ray cluster, as in `notebook_launcher`.

    Attributes:
        job: what the workers run.
        started: when the session was made, in seconds since the epoch.

    Raises:
        ValueError, TypeError: arguments are wrong. The message has all problems; those of `environment` come alone.
        ConfigError: the config is wrong.
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
        hosts: Sequence[str] | None = None,
        python: str | Mapping[str, str] | None = None,
        slurm: Mapping[str, Any] | None = None,
        num_nodes: int = 1,
        slurm_keep: float = 120.0,
        engine: str | Engine = "auto",
        address: str | None = None,
    ) -> None:
        __tracebackhide__ = True
        raise_all(list(check_environment("environment", environment)), "Session")
        check_seconds(grace=grace)
        options = {
            "num_processes": num_processes,
            "mixed_precision": mixed_precision,
            "start_method": start_method,
            "output": output,
            "log_line_prefix_template": log_line_prefix_template,
            "hosts": hosts,
            "python": python,
            "slurm": slurm,
            "num_nodes": num_nodes,
            "slurm_keep": slurm_keep,
            "engine": engine,
            "address": address,
            "hang_timeout": hang_timeout,
        }
        options = resolve_options(options, environment or {}, config)
        request = LaunchRequest(function=service.join, options=options, quiet=True, serve=service.serve)
        job, self._engine = preflight.check(request, "Session")
        is_here = self._engine.on_this_node
        if not is_here and type(self._engine).make_session_group is Engine.make_session_group:
            raise ValueError(
                f"Session: engine={job.engine!r} has no sessions: choose 'ssh', with hosts=, 'slurm' or 'ray'"
            )
        self.job = registry.reserve_devices(job) if is_here else job
        self.grace = grace
        self.started = time.time()
        self._held: list[Workers] = []
        self._pid = os.getpid()
        weakref.finalize(self, _close_all, self._held)
        try:
            self._start()
            registry.add_session(self)
        except BaseException as error:
            self.close()
            self._held.clear()
            failures.forget_variables(error)  # of the package, which would keep the workers
            raise

    def _start(self) -> None:
        __tracebackhide__ = True
        if self._engine.on_this_node:
            registry.require_descriptors(self.num_processes)
        with interrupts.delay_interrupt(interrupts.PATIENCE):
            self._held[:] = [workers := Workers(self.job, self._engine)]
            try:
                workers.start()
                self._call(service.join, (), name="the start of the session", returns="none", is_start=True)
                workers.calls = 0
            except BaseException as error:
                workers.close()
                # a terminal interrupts the workers too, and the end of one may be noticed first
                if isinstance(error, KeyboardInterrupt) or interrupts.is_interrupted():
                    raise KeyboardInterrupt("the session is closed: its start was interrupted") from None
                raise

    @property
    def _workers(self) -> Workers:
        return self._held[0]

    # -- calls

    def run(
        self, function: Callable[..., Any], /, *args: Any, returns: Returns = "first", **kwargs: Any
    ) -> Any:
        """Call `function(*args, **kwargs)` on every rank.

        The function sees the globals of the notebook as they are now, as in a launch. A name that the notebook does not
        have is a variable of the worker. If the function assigns a global, it stays on the worker.

        Args:
            function: each worker calls it. It may be defined in a cell.
            args: positional arguments of the function.
            returns: `first` returns the value of rank 0, `all` the list of values by rank, `none` None.
            kwargs: keyword arguments of the function.

        Returns:
            What `returns` asks for. Tensors arrive on the CPU.

        Raises:
            SessionError: the session is closed or busy, or has lost a worker.
            ShipError: the function or a value cannot be pickled. The message names the object that cannot be.
            BaseException: the exception of the rank that failed first.
            KeyboardInterrupt: the user interrupted the cell. The call was stopped on all ranks, and the session goes
                on.
        """
        __tracebackhide__ = True
        if returns not in get_args(Returns):
            raise ValueError(f"returns={returns!r}: choose among {', '.join(map(repr, get_args(Returns)))}")
        preflight.check_call(function, args, kwargs, "Session.run")
        values = self._call(function, args, kwargs, returns=returns)
        return values if returns == "all" else values[0] if returns == "first" else None

    def push(self, values: Mapping[str, Any] | None = None, /, *, ranks: Ranks = "all", **named: Any) -> None:
        """Set variables of the workers: `push(x=1)`, or `push({"x": 1}, ranks=0)`.

        Args:
            values: values by name.
            ranks: one rank, a collection of ranks, or `all`.
            named: more values by name.

        Raises:
            TypeError: `values` is not a mapping.
            ValueError: a name is not a Python identifier, or a rank does not exist.
            BaseException: what `run` raises.
        """
        __tracebackhide__ = True
        if values is not None and not isinstance(values, Mapping):
            raise TypeError(f"push takes values by name, as {{'x': 1}} or x=1, not {values!r}")
        variables = {**(values or {}), **named}
        wrong = [name for name in variables if not _is_name(name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} cannot be the name of a variable")
        self._call(service.push, (variables,), name="push", ranks=ranks, returns="none")

    def pull(self, name: str, rank: int | Literal["all"] = 0) -> Any:
        """Return a variable of the workers.

        Args:
            name: name of the variable.
            rank: whose variable, or `all`.

        Returns:
            The value; with `all` the list of values by rank. Tensors arrive on the CPU.

        Raises:
            NameError: a worker has no variable of this name.
            ValueError: the rank does not exist.
            BaseException: what `run` raises.
        """
        __tracebackhide__ = True
        values = self._call(service.pull, (name,), name="pull", ranks=rank, returns="all")
        return values if rank == "all" else values[0]

    def execute(self, code: str, ranks: Ranks = "all", *, filename: str = "<session>") -> None:
        """Run code on the workers with their variables as globals, and show the value of its last expression by rank.

        Args:
            code: Python source.
            ranks: one rank, a collection of ranks, or `all`.
            filename: name of the source in tracebacks; for a cell, the name that IPython gives it.

        Raises:
            TypeError: the code is not a string.
            ValueError: a rank does not exist.
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
        is_start: bool = False,
    ) -> list[Any]:
        """Run a call to its end, and return the values by rank, for the ranks that send one.

        Where the start of a session fails, its workers are ended at once.
        """
        __tracebackhide__ = True
        chosen = self._resolve_ranks(ranks)
        self._check_usable()
        workers = self._workers
        name = name or getattr(function, "__qualname__", None) or type(function).__name__
        pickled = pack_call(function, args, dict(kwargs or {}), name)
        sending = {"first": chosen[:1], "all": chosen, "none": []}[returns]
        sink = TextSink(self.job.output, self.job.prefix)
        now = time.time()
        sink.show([Phase(rank=rank, time=now, name="starting") for rank in range(self.num_processes)])
        with interrupts.delay_interrupt(interrupts.PATIENCE):  # obeyed between two looks: else it stays busy
            with interrupts.delay_interrupt():
                call = workers.begin(pickled, name, chosen, sending, self.grace)
            try:
                while call.unfinished or call.waiting:
                    workers.show(call, sink)
                    interrupts.obey_interrupt()
            except BaseException as error:
                if not is_start:
                    self._stop_call(call, sink, error)
                raise
            with interrupts.delay_interrupt():
                notes = workers.finish(call, sink)
                sink.close()
        if call.failures or call.was_interrupted:
            raised, ends = call.build_error(workers.record, self._describe_future())
            for note in notes:
                failures.add_note(raised, note)
            if not failures.notes_are_shown():
                sink.note("\n".join([*ends, *notes]))
            raise raised
        return [unpack_value(call.results[rank]) for rank in sending]

    def _stop_call(self, call: Call, sink: Sink, error: BaseException) -> None:
        """End the call on all ranks, after an interrupt or because its output cannot be shown."""
        if isinstance(error, SessionError):
            return
        if not isinstance(error, KeyboardInterrupt):
            sink = TextSink("none")  # the sink of the call failed
        with interrupts.delay_interrupt():
            self._workers.bring_back(call, sink)
            for note in self._workers.finish(call, sink):
                sink.note(note)
            sink.close()
        if isinstance(error, KeyboardInterrupt):
            text = f"{call.name}: stopped on all ranks, {self._describe_future()}"
            raise KeyboardInterrupt(text) from None

    def _describe_future(self) -> str:
        """Return a clause that says whether there will be another call, for whoever stopped one."""
        workers = self._workers
        if not workers.problem:
            return "the session goes on"
        with_it = ", ".join(f"rank {rank}" for rank in sorted(workers.dead)) or "the process group"
        return f"and {with_it} with it: session.restart() starts new workers"

    # -- stop, restart, close

    def stop(self, grace: float = 30.0) -> None:
        """Stop the call that runs. This is called from another thread, and the session goes on.

        If the ranks use `accelerator.should_stop`, all of them get True at the same call of it. Then they have `grace`
        seconds to return. Other ranks are interrupted at once. Without a running call nothing happens.

        Args:
            grace: seconds that ranks have to return.

        Raises:
            ValueError, TypeError: `grace` is not a number of seconds.
        """
        check_owner(self._pid, "session", SessionError)
        check_seconds(grace=grace)
        if not self.is_over and (call := self._workers.call) is not None:
            call.control.stop(grace)

    def restart(self) -> None:
        """End all workers and start new ones. The variables of the workers are lost.

        Raises:
            SessionError: the session is closed.
            LaunchError: the new workers cannot start.
        """
        __tracebackhide__ = True
        check_owner(self._pid, "session", SessionError)
        if self.is_over:
            raise SessionError("the session is closed: make a new one")
        self._workers.close()
        self._start()

    def close(self) -> None:
        """End the workers. On a closed session this does nothing."""
        _close_all(self._held)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- its state

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
        """Whether the session is closed; one whose start failed has no workers."""
        return not self._held or self._workers.is_over

    @property
    def status(self) -> Status:
        """`idle`, `busy` with a call, `dead` if it needs a restart, or `closed`."""
        workers = self._workers
        if workers.is_over:
            return "closed"
        if workers.problem:
            return "dead"
        return "busy" if workers.call is not None else "idle"

    @property
    def calls(self) -> int:
        """Number of calls since the workers were started."""
        return self._workers.calls

    def lines(self, rank: int | None = None) -> list[str]:
        """Return the last lines of output, also those that came between calls, which the next call shows.

        Args:
            rank: whose lines; None is all ranks.
        """
        return self._workers.record.lines(rank)

    def __repr__(self) -> str:
        status, workers = self.status, self._workers
        kind = "process" if self.num_processes == 1 else "processes"
        words = [f"{self.num_processes} {kind}: {status}"]
        if status == "busy" and (call := workers.call) is not None:
            words[0] += f" with {call.name} for {format_duration(call.start.seconds)}"
        if status == "dead":
            words += [workers.problem, "restart() starts new workers"]
        if status in ("idle", "busy"):
            words.append(f"{self.calls} {'call' if self.calls == 1 else 'calls'} so far")
            words.append(f"pids {', '.join(map(str, self.pids))}")
        return f"<Session of {', '.join(words)}>"

    def _check_usable(self) -> None:
        __tracebackhide__ = True
        workers = self._workers
        check_owner(self._pid, "session", SessionError)
        if workers.is_over:
            raise SessionError("the session is closed: make a new one")
        if workers.problem:
            raise SessionError(f"{workers.problem}. {RESTART}")

    def _resolve_ranks(self, ranks: Ranks) -> list[int]:
        """Return the ranks that the user asks for, sorted."""
        __tracebackhide__ = True
        everyone = range(self.num_processes)
        if isinstance(ranks, str) and ranks == "all":
            return list(everyone)
        found = list(ranks) if isinstance(ranks, Iterable) else [ranks]
        if not found or not all(type(rank) is int and rank in everyone for rank in found):
            raise ValueError(f"ranks={ranks!r}: the ranks of this session are 0 to {self.num_processes - 1}")
        return sorted(set(found))


def current_session() -> Session | None:
    """Return the session that `%%distributed` uses: the newest one that is not closed. None without one."""
    living: list[Session] = registry.sessions()
    return living[-1] if living else None


def _close_all(held: list[Workers]) -> None:
    for workers in held:
        workers.close()


def resolve_options(
    options: Mapping[str, Any], environment: Mapping[str, str], config: Source | None
) -> dict[str, Any]:
    """Return the options of a session, `environment` among them.

    Args:
        options: of the call, by the names that they have in `notebook_launcher`.
        environment: variables of the workers, of the call.
        config: supplies the options that the call leaves at their defaults; what is no option of a session reaches the
            workers as a variable, where it has one.

    Raises:
        ConfigError: the config is wrong.
        ValueError: only SLURM's sessions have several nodes.
    """
    __tracebackhide__ = True
    found = {**options, "environment": environment}
    if config is not None:
        from ..config import launch as by_config

        defaults = arguments.defaults()
        given = {name: value for name, value in options.items() if value != defaults[name]}
        read = by_config.arguments_beside(by_config.find_config(config), given)
        found |= {name: value for name, value in read.values.items() if name in options}
        found["environment"] = {**arguments.variables(read.values), **read.environment, **environment}
    engine = found["engine"]
    if found["num_nodes"] != 1 and not found["slurm"] and getattr(engine, "name", engine) != "slurm":
        raise ValueError(f"Session: num_nodes={found['num_nodes']!r}: it is for engine='slurm'")
    if found["num_processes"] is None and engine == "auto" and not (found["hosts"] or found["slurm"]):
        variables = found["environment"]
        use_cpu = environ.flag_in(variables, "ACCELERATE_USE_CPU")
        if devices.best(use_cpu, environment=variables) is devices.CPU:
            found["num_processes"] = _CPU_PROCESSES
    return found


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
