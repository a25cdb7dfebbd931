"""`notebook_launcher` and `debug_launcher`: a function on N processes, from a notebook cell or a script."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from . import environ
from .launch import kernel_state

if TYPE_CHECKING:  # what a launch needs is imported by the first one: workers and scripts need none of it
    from .config.launch import Source
    from .launch.engines.base import Engine
    from .launch.job import Job, OnHang, Returns, StartMethod, View
    from .launch.run import MakeSink, Run

P = ParamSpec("P")
T = TypeVar("T")

kernel_state.watch()


def _noting_given(launcher: Callable[P, T]) -> Callable[P, T]:
    """Tell a launcher which arguments it was given by hand: these count more than a config's."""
    signature = inspect.signature(launcher)

    @functools.wraps(launcher)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        has_config = kwargs.get("config") is not None
        if not has_config and not any(
            isinstance(value, str) and ":" in value for value in (*args, *kwargs.values())
        ):
            return launcher(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        number = bound.arguments.get("num_nodes")
        if isinstance(number, str) and ":" in number:  # a range
            bound.arguments.setdefault("rdzv_backend", "c10d")
        if has_config:
            from .config import launch as by_config

            found = by_config.arguments(by_config.found(bound.arguments.pop("config")), bound.arguments)
            bound.arguments.update(found.values)
            own = bound.arguments.get("environment") or {}
            bound.arguments["environment"] = {**found.environment, **own}
        return launcher(*bound.args, **bound.kwargs)

    return wrapper


@_noting_given
def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int | str = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    start_method: StartMethod = "auto",
    returns: Returns = "first",
    output: Literal["all", "first", "none"] | Collection[int] = "all",
    environment: Mapping[str, str] | None = None,
    config: Source | None = None,
    block: bool = True,
    log_dir: str | os.PathLike[str] | None = None,
    view: View = "auto",
    hang_timeout: float | None = 300.0,
    on_hang: OnHang = "tell",
    engine: str | Engine = "auto",
    address: str | None = None,
    tpu_mode: Literal["process", "spmd"] = "process",
) -> Any:
    """Run a function on several processes and return what it returns.

    Output, displays, figures and tqdm bars of the workers come into the cell while they run. Nothing has to be
    kept out of the notebook before: where this process cannot be forked (a GPU was used in it, or OpenMP), fresh
    processes run the function. ACCELERATE_DEBUG_MODE=1 makes a dry launch first.

    Args:
        function: what each process runs, as `function(*args)`; it may be defined in a cell.
        args: its arguments.
        num_processes: processes on this node (under Ray: on all); None is one per GPU or TPU chip, or 1 (under Ray: one
            per CPU).
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`: what an `Accelerator` in the workers uses.
        use_port: port of the rendezvous store on node 0; None is a free one.
        master_addr: address of node 0.
        node_rank: number of this node, from 0.
        num_nodes: nodes of the run; each runs the same cell. `"1:4"` is 1 to 4, which may join and leave: then all
            workers start again, so the function should go on from its last checkpoint. The node with `node_rank` 0
            on the machine of that address holds the store, and must stay.
        rdzv_backend: how several nodes meet: `static` or `c10d`, which a range of nodes implies.
        rdzv_endpoint: `host:port` where they meet, instead of `master_addr` and `use_port`.
        rdzv_conf: settings of the rendezvous: `join_timeout` is the seconds that a node waits for the others.
        rdzv_id: name of the run.
        max_restarts: how often all workers are started again after one failed here; nodes that come or go do not
            count.
        monitor_interval: seconds between two looks at the workers; their end is noticed at once anyway.
        log_line_prefix_template: text before each line where several ranks are shown; `${rank}`,
            `${local_rank}` and `${role_name}` are filled in.
        start_method: `fork` copies this process, `forkserver` and `spawn` start fresh ones; `auto` forks where
            that is safe and uses a fork server otherwise.
        returns: `first` returns rank 0's value, on every node, `all` the list of this node's
            values by rank, `none` None. Tensors arrive on the CPU.
        output: ranks whose output is shown: `all`, `first`, `none` or a collection of ranks.
        environment: variables of the workers alone.
        config: `default` for the file that `write_basic_config` and `notebook-accel config` write, the path of
            another, or a `LaunchConfig`; it counts for all that is not given here. None uses no config.
        block: False returns a `Run` at once: `run.result()` or `await run` waits for the value, `run.stop()` stops
            it, `notebook_accel.runs()` lists all. The function and what it uses are taken as they are at the call,
            and processes of their own run it, also where there is one; they end with this process.
        log_dir: folder to which all output of each worker is written too, `rank_0.log` and so on; an earlier run's
            is kept above it.
        view: how the run is shown. `widget` is a live view with a Stop button, which becomes a static page at the end;
            `text` prints lines; `none` shows nothing but errors; `auto` is the environment variable
            NOTEBOOK_ACCEL_VIEW, else the widgets in a notebook that has ipywidgets, and text elsewhere.
        hang_timeout: seconds after which it is told where each rank is, if nothing was heard of any of them: no step,
            batch, line, bar, metric or display, and no collective that was entered or left. None never tells.
        on_hang: `tell` goes on waiting, `raise` ends the run, or starts its workers again where `max_restarts` allows.
        engine: what starts the processes: `inprocess` runs one in this process, `elastic` starts them here under torch
            elastic, `xla` one for each TPU chip, `ray` on a Ray cluster; other packages add more by the entry points
            `notebook_accel.engines`; an `Engine` is one, too. `auto` is what the machine and the other arguments need.
        address: where the cluster is, for an engine that has one: under Ray `auto`, `host:port` or `ray://host:port`;
            None is the one that this process is connected to, else a Ray that starts here.
        tpu_mode: `process` is one process for each TPU chip; `spmd` is one process that uses all chips, this one where
            it has not used the TPU for something else.

    Returns:
        What `returns` asks for. A single process is this process, and the value is the function's own. A `Run` where
        `block` is False.

    Raises:
        ValueError, TypeError: wrong arguments, all in one message, before anything starts.
        ConfigError: the config is wrong; it names file, line and option.
        LaunchError: the nodes do not fit together, or one did not come in time; it names them.
        ShipError: the function cannot be sent to fresh processes; the message says because of what.
        HangError: nothing went on any more, and `on_hang` is `raise`.
        WorkerError: a worker was killed, or left without returning; with several nodes also: a node is gone.
        BaseException: the exception of the first rank that failed, with its own type and traceback.
        KeyboardInterrupt: after all workers have ended.
    """
    __tracebackhide__ = True
    from .launch.job import Job, Rendezvous

    if not isinstance(block, bool):
        raise TypeError(f"notebook_launcher: block={block!r}: True or False is needed")
    rendezvous = Rendezvous(
        address=master_addr,
        port=use_port,
        node_rank=node_rank,
        num_nodes=num_nodes,
        backend=rdzv_backend,
        endpoint=rdzv_endpoint,
        run_id=rdzv_id,
        settings=rdzv_conf,
    )
    job = Job(
        function=function,
        args=args,
        num_processes=num_processes,
        mixed_precision=mixed_precision,
        start_method=start_method,
        returns=returns,
        output=output,
        rendezvous=rendezvous,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        prefix=log_line_prefix_template,
        environment={} if environment is None else environment,
        background=not block,
        log_dir=log_dir,
        view=view,
        hang_timeout=hang_timeout,
        on_hang=on_hang,
        engine=engine,
        address=address,
        tpu_mode=tpu_mode,
    )
    return _run(job, "notebook_launcher")


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Run a function on CPU processes, also where there are GPUs, and return rank 0's value.

    Args, errors and output are those of `notebook_launcher`.
    """
    __tracebackhide__ = True
    from .launch.job import Job

    job = Job(
        function=function,
        args=args,
        num_processes=num_processes,
        environment={"ACCELERATE_USE_CPU": "true"},
    )
    return _run(job, "debug_launcher")


def runs() -> list[Run]:
    """Return the launches of this process, oldest first: all that still run, and the last ones that ended."""
    from .launch import registry

    return registry.runs()


def _run(job: Job, caller: str) -> Any:
    __tracebackhide__ = True
    from .launch import guard, preflight
    from .launch.engines.base import Engine
    from .launch.start import launch, launch_in_background
    from .stream.logs import LogFiles
    from .widgets.run import sink_for

    ready = preflight.checked(job, caller)
    if ready.distributed and isinstance(ready.engine, Engine) and ready.engine.load(ready):
        ready = preflight.checked(job, caller)  # what an import started could forbid the fork
    asked = environ.flag_in(ready.environment, "ACCELERATE_DEBUG_MODE")
    if environ.flag("ACCELERATE_DEBUG_MODE") if asked is None else asked:
        guard.dry_launch(ready)
    sinks: list[MakeSink] = [sink_for]
    folder = ready.log_dir
    if folder is not None and ready.distributed:
        # before the view, which would be left behind where the folder cannot be made
        sinks.insert(0, lambda run: LogFiles(folder, run.job.name))
    return launch_in_background(ready, sinks) if ready.background else launch(ready, sinks)
