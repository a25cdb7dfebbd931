"""Job: what a launch runs, after preflight has checked every argument and made every choice."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from .. import devices, tpu
from ..config.launch_options import OnHang, Returns, StartMethod, View
from ..errors import LaunchError
from ..stream.sinks import Output
from ..trust.secret import OPEN, Trust


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a run meet.

    Attributes:
        address: host name or address of node 0.
        port: port of the rendezvous store on node 0; 0 is any free port.
        node_rank: number of this node, from 0.
        num_nodes: number of nodes. If nodes may join and leave, the largest number.
        min_nodes: the smallest number of nodes with which the run goes on; 0 if the number is fixed.
        backend: `static` if the user gives each node its rank, `c10d` if the rendezvous does.
        endpoint: "host:port", used in place of `address` and `port`; empty for none.
        run_id: name of the run, the same on all nodes.
        settings: the user's `rdzv_conf`; None for none.
        trust: whether the nodes prove a secret.
    """

    address: str = "127.0.0.1"
    port: int = 0
    node_rank: int = 0
    num_nodes: int = 1
    min_nodes: int = 0
    backend: str = "static"
    endpoint: str = ""
    run_id: str = "none"
    settings: Mapping[str, Any] | None = None
    trust: Trust = field(default=OPEN, compare=False)

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave."""
        return self.min_nodes > 0

    @property
    def elects(self) -> bool:
        """Whether the nodes find out which one the others connect to, and get their ranks there."""
        return self.backend != "static" or self.is_elastic


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function, its arguments and how to run it, ready to run.

    Attributes:
        function: each process calls it, as `function(*args)`. The job of a run that has ended has it no more.
        args: positional arguments of the function; likewise.
        name: name of the function, for messages.
        engine: name of the engine that starts the processes.
        local_world_size: number of processes on this node; for an engine with a cluster, on all nodes.
        device_kind: kind of device that the processes compute on.
        distributed: whether worker processes run the function. If False, this process runs it.
        mixed_precision: `no`, `fp16`, `bf16` or `fp8`.
        start_method: how processes start. It is `auto` only if the engine starts them in its own way.
        returns: `first` returns the value of rank 0, `all` the list of values by rank, `none` None.
        output: ranks whose output is shown: `all`, `first`, `none` or a collection of ranks.
        rendezvous: where the nodes meet.
        max_restarts: how many times all workers start again after one of them has failed.
        monitor_interval: seconds between two looks at the other nodes.
        prefix: `string.Template` of the text before each line of output; None is the default.
        view: how the run is shown: `auto`, `widget`, `text` or `none`.
        environment: variables that the workers get besides those of this process.
        background: whether the launch returns at once, and a thread runs the job.
        log_dir: folder for files with the output of each rank; None writes no files.
        hang_timeout: seconds without any event of a rank after which a hang is reported; None never reports one.
        on_hang: `tell` reports a hang and goes on waiting, `raise` ends the run.
        address: address of the engine's cluster; None is the engine's default.
        tpu_mode: `process` is one process for each TPU chip, `spmd` one process that uses all chips.
        options: every argument of `notebook_launcher` by name, also those that have no attribute here.
        quiet: whether the run is neither announced nor listed by `runs()`: a dry launch or a session.
        serve: the workers of a session run this in place of the function; see `worker.main.WorkerSpec`.
        attached: the `Folder` of a run that goes on already, and is only watched; None where the job is to start.
        holds: ids of the devices that this run alone uses, as in CUDA_VISIBLE_DEVICES; empty on CPUs.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    name: str
    engine: str = "local"
    local_world_size: int
    device_kind: devices.DeviceKind
    distributed: bool
    mixed_precision: str = "no"
    start_method: StartMethod = "auto"
    returns: Returns = "first"
    output: Output = "all"
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    max_restarts: int = 0
    monitor_interval: float = 0.1
    prefix: str | None = None
    view: View = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    background: bool = False
    log_dir: str | os.PathLike[str] | None = None
    hang_timeout: float | None = 300.0
    on_hang: OnHang = "tell"
    address: str | None = None
    tpu_mode: tpu.Mode = "process"
    options: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = False
    serve: Callable[..., None] | None = None
    attached: Any = None
    holds: tuple[str, ...] = ()

    def without_work(self) -> Job:
        """Return the job of a run that has ended: without the function and its arguments, which may be large."""
        return replace(self, function=_refuse_to_run, args=())


def _refuse_to_run(*args: object) -> NoReturn:
    raise LaunchError("the run has ended and has not kept its function: call notebook_launcher again")
