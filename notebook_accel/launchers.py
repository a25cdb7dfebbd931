"""`notebook_launcher` and `debug_launcher`: run a function on several processes, from a notebook cell or a script."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from . import environ
from .launch.checks import cuda_use
from .takeover.names import complete_names

if TYPE_CHECKING:  # the first launch imports what launches need: workers and scripts do not need it
    from .config.launch import Source
    from .config.launch_options import OnHang, Returns, StartMethod, View
    from .launch.durations import Start
    from .launch.engines.base import Engine
    from .launch.engines.ssh.engine import SshEngine
    from .launch.job import Job
    from .launch.request import LaunchRequest
    from .launch.run import MakeSink
    from .widgets.run.comparison import RunList

P = ParamSpec("P")
T = TypeVar("T")

cuda_use.record()


def _apply_config(launcher: Callable[P, T]) -> Callable[P, T]:
    """Decorate a launcher: its config supplies the arguments that the call does not have."""
    signature = inspect.signature(launcher)

    @functools.wraps(launcher)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{launcher.__name__}() {error}") from None
        number = bound.arguments.get("num_nodes")
        if isinstance(number, str) and ":" in number:  # a range
            bound.arguments.setdefault("rdzv_backend", "c10d")
        if bound.arguments.get("config") is not None:
            from .config import launch as by_config

            found = by_config.arguments_beside(
                by_config.find_config(bound.arguments.pop("config")), bound.arguments
            )
            bound.arguments.update(found.values)
            environment = bound.arguments.get("environment") or {}
            bound.arguments["environment"] = {**found.environment, **environment}
        return launcher(*bound.args, **bound.kwargs)

    return wrapper


@_apply_config
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
    hosts: Sequence[str] | None = None,
    python: str | Mapping[str, str] | None = None,
    slurm: Mapping[str, Any] | None = None,
    slurm_keep: float = 120.0,
    slurm_notice: float = 120.0,
    detach: bool = False,
    name: str | None = None,
    tpu_mode: Literal["process", "spmd"] = "process",
    secret: str | os.PathLike[str] | None = None,
) -> Any:
    """Run a function on several processes, and return its value.

    Output, displays, figures and tqdm bars of the workers appear in the cell while they run. The notebook may do
    anything before the launch. If its process cannot be forked, because it has used a GPU or OpenMP for example, fresh
    processes run the function, with the notebook's settings of torch and Python. With the environment variable
    ACCELERATE_DEBUG_MODE=1 a dry launch comes first.

    Args:
        function: each process calls it, as `function(*args)`. It may be defined in a cell.
        args: positional arguments of the function.
        num_processes: number of processes on this node; under Ray, ssh and SLURM on all nodes. None is one for each GPU
            or TPU chip, or 1 without any; under Ray one for each CPU if there is no GPU.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`. An `Accelerator` in the workers uses it.
        use_port: port of the rendezvous store on node 0; None is a free port.
        master_addr: host name or address of node 0.
        node_rank: number of this node, from 0.
        num_nodes: number of nodes. Each node runs the same cell; under SLURM one cell drives all. With `"1:4"` there
            may be 1 to 4 nodes, which may join and leave. Each time all workers start again, so the function should
            continue from its last checkpoint. Node 0 has to stay: it holds the rendezvous store, and `master_addr` is
            its address.
        rdzv_backend: how several nodes meet: `static` or `c10d`. With `num_nodes="1:4"` it is `c10d`.
        rdzv_endpoint: `host:port` where the nodes meet, in place of `master_addr` and `use_port`.
        rdzv_conf: settings of the rendezvous. `join_timeout` is how many seconds a node waits for the others.
        rdzv_id: name of the run, the same on all nodes.
        max_restarts: how many times all workers start again after one of them has failed. Restarts because nodes join
            or leave do not count.
        monitor_interval: seconds between two looks at the other nodes, where there are several. The end of a worker is
            noticed at once.
        log_line_prefix_template: `string.Template` of the text before each line of output, if several ranks are shown.
            It may contain `${rank}`, `${local_rank}` and `${role_name}`.
        start_method: `fork` copies this process, `fresh` starts new ones. `auto` forks where that is safe.
        returns: `first` returns the value of rank 0 on every node, `all` the list of values of this node by rank,
            `none` None. Tensors arrive on the CPU.
        output: ranks whose output is shown: `all`, `first`, `none` or a collection of ranks.
        environment: environment variables that only the workers get.
        config: supplies the arguments that are not given here. `default` is the file that `write_basic_config` and
            `notebook-accel config` write; otherwise the path of a file, or a `LaunchConfig`. None uses no config.
        block: whether the cell waits for the end of the run. False returns a `Run` at once: `run.result()` or `await
            run` waits for the value, `run.stop()` stops the run, and `notebook_accel.runs()` lists all runs. The
            function and the globals that it uses are copied at the call. Worker processes run it even if there is only
            one. They end when this process ends.
        log_dir: folder for the whole output of each worker, in files `rank_0.log` and so on. A file that exists is
            appended to. None writes no files.
        view: how the run is shown. `widget` is a live view with a Stop button, which becomes a static page at the end.
            `text` prints lines. `none` shows only errors. `auto` is the environment variable NOTEBOOK_ACCEL_VIEW if it
            is set; otherwise `widget` in a notebook with ipywidgets, and `text` elsewhere.
        hang_timeout: seconds without any sign of progress, after which a report says where each rank is. A sign of
            progress is a step, batch, line, bar, metric or display, and the begin or end of a collective. None never
            reports.
        on_hang: `tell` reports a hang and goes on waiting. `raise` ends the run, or restarts its workers if
            `max_restarts` allows it.
        engine: what starts the processes. `inprocess` runs a single one in this process, `local` starts workers here,
            also where this is one node of several, `xla` starts one for each TPU chip, `ray` starts them
            on a Ray cluster, `ssh` on `hosts`, `slurm` on the nodes of a SLURM cluster. Other packages add engines by
            the entry points `notebook_accel.engines`. An `Engine` object is possible too. `auto` chooses by the machine
            and the other arguments.
        address: address of the engine's cluster; under Ray `auto`, `host:port` or `ray://host:port`. None is the
            cluster that this process is connected to; without one, Ray starts on this machine.
        hosts: where ranks run, reached by your own ssh client: `["gpu1", "gpu2:4", "me@10.0.0.7"]`. `gpu2:4` has four
            ranks. Without a number a host has one for each GPU, or one. Rank 0 is on the first host.
        python: path of the Python on the hosts or nodes, under ssh also a dict of those by host. None is the path of
            this process's Python, else `python3` there.
        slurm: what a launch by SLURM asks for, options of `sbatch` by name: `{"partition": "gpu", "time": "02:00:00",
            "gpus_per_node": 4}`. Inside an allocation nothing is submitted, and they have no effect.
        slurm_keep: seconds that a job's nodes stay for the next launch after a run. They cost meanwhile. 0 ends the job
            with the run.
        slurm_notice: seconds before a job's time limit at which `accelerator.should_stop` turns true.
        detach: whether the run goes on when the cell is interrupted or the notebook ends: on this machine, on hosts by
            ssh, or as a job of SLURM. `attach` shows it again and gives its value, in any notebook. `run.stop()` and
            Stop end it.
        name: how the run is called where it is shown, and by `attach`. None is the name of the function.
        tpu_mode: `process` is one process for each TPU chip. `spmd` is one process that uses all chips: this process,
            if it has not used the TPU in another way.
        secret: what the nodes of a run prove to each other, the same on all of them: a text, or the `Path` of a file
            that only you can read. None is the file that the environment variable NOTEBOOK_ACCEL_SECRET_FILE names,
            else the variable NOTEBOOK_ACCEL_SECRET. Without a secret the nodes exchange plain data only: a returned
            value of numbers, texts, tensors and arrays, and exceptions of Python's own.

    Returns:
        The value or values that `returns` asks for. If a single process is enough, this process runs the function. With
        `block=False` a `Run`.

    Raises:
        ValueError, TypeError: arguments are wrong. The message has all problems, and nothing was started.
        ConfigError: the config is wrong. The message names file, line and option.
        LaunchError: the workers cannot start, for example because nodes do not fit together or one did not come in
            time.
        ShipError: the function cannot be pickled for fresh processes. The message names the object that cannot be.
        HangError: no rank made progress for `hang_timeout` seconds, and `on_hang` is `raise`.
        WorkerError: a worker was killed or exited without returning. With several nodes also: a node was lost.
        BaseException: the exception of the rank that failed first, with its own type and traceback.
        KeyboardInterrupt: the user interrupted the cell. All workers have ended.
    """
    options = {**locals()}  # all arguments by name
    __tracebackhide__ = True
    from .launch.request import LaunchRequest

    del options["function"], options["args"], options["config"]
    return _run(LaunchRequest(function=function, args=args, options=options), "notebook_launcher")


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Run a function on CPU processes, even if there are GPUs, and return the value of rank 0.

    Output appears in the cell as with `notebook_launcher`.

    Args:
        function: each process calls it, as `function(*args)`. It may be defined in a cell.
        args: positional arguments of the function.
        num_processes: number of processes.

    Returns:
        The value of rank 0. Tensors arrive on the CPU.

    Raises:
        BaseException: what `notebook_launcher` raises.
    """
    __tracebackhide__ = True
    from .launch.request import LaunchRequest

    options = {"num_processes": num_processes, "environment": {"ACCELERATE_USE_CPU": "true"}}
    request = LaunchRequest(function=function, args=args, options=options)
    return _run(request, "debug_launcher")


def runs() -> RunList:
    """Return the runs of this process, oldest first: all that still run, and the last ones that have ended.

    A launch drops the oldest runs that have ended from the list, up to the last eight. Each run keeps its number:
    `runs().find(3)` is the third launch, as long as it is in the list.

    A notebook shows the list as a table, and the metrics of all its runs in common charts; also a part of the list, as
    `runs()[-2:]`.

    An ended run in the list has its status, failure, lines and metrics. That of a launch with `block=False` has its
    value too; launches that block give their values to their cells alone.
    """
    from .launch import registry
    from .widgets.run.comparison import RunList

    return RunList(registry.runs())


def attach(
    run: int | str | None = None,
    *,
    hosts: Sequence[str] | None = None,
    python: str | Mapping[str, str] | None = None,
    engine: SshEngine | None = None,
    block: bool = True,
    output: Literal["all", "first", "none"] | Collection[int] = "all",
    log_line_prefix_template: str | None = None,
    view: View = "auto",
) -> Any:
    """Show a run that was launched with `detach=True`: its output so far, then what comes; and return its value.

    An interrupt of the cell leaves the run, which goes on. It may be attached to any number of times, also after its
    end, and from several notebooks at once.

    Args:
        run: its number, that of its job of SLURM, or its name, of which the newest run counts; None is the one that was
            launched last.
        hosts: those of a launch by ssh, the first of which has the run; None is this machine, or its cluster.
        python: that of the launch by ssh.
        engine: that of the launch by ssh, where it had options for the client.
        block: see `notebook_launcher`, as for the others.
        output: see `block`.
        log_line_prefix_template: see `block`.
        view: see `block`.

    Returns:
        What the launch would have returned; with `block=False` a `Run`.

    Raises:
        LaunchError: nothing is known of the run, or it is lost: it has ended without a word of its ranks; or its host
            cannot be reached.
        ValueError, TypeError: an argument is wrong.
        BaseException: what `notebook_launcher` raises.
    """
    shown = {"output": output, "log_line_prefix_template": log_line_prefix_template, "view": view}
    __tracebackhide__ = True
    from .launch import attaching

    where = {"hosts": hosts, "python": python, "engine": engine}
    found, watcher, start = attaching.find(run, {"block": block, **where, **shown})
    return _open(found, watcher, start)


def _run(request: LaunchRequest, caller: str) -> Any:
    __tracebackhide__ = True
    from . import interrupts
    from .launch import dry_run, preflight

    job, engine = preflight.check(request, caller)
    is_debug = environ.flag_in(job.environment, "ACCELERATE_DEBUG_MODE")
    if environ.flag("ACCELERATE_DEBUG_MODE") if is_debug is None else is_debug:
        with interrupts.delay_interrupt(interrupts.PATIENCE):
            dry_run.launch(job, engine)
    return _open(job, engine)


def _open(job: Job, engine: Engine, start: Start | None = None) -> Any:
    """Run a job, or watch one that runs already, and show it in the cell."""
    __tracebackhide__ = True
    from . import interrupts
    from .launch import registry
    from .stream.logs import LogFiles
    from .widgets.run import make_sink

    sinks: list[MakeSink] = [make_sink]
    folder = job.log_dir
    if folder is not None and job.distributed and not engine.outlives(job):
        # before the view: if the folder cannot be made, no view was opened
        sinks.insert(0, lambda run: LogFiles(folder, run.job.name))
    # the waits in it obey: anywhere else an interrupt could leave a run that never ends
    with interrupts.delay_interrupt(interrupts.PATIENCE):
        run = registry.open_run(job, engine, sinks, start)
        if not job.background:
            return run.call()
        run.start()
    return run


complete_names(__name__)
