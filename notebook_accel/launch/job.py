"""What is to be launched, frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .. import devices, environ, tpu
from ..stream.sinks import Output

if TYPE_CHECKING:
    from .engines.base import Engine

StartMethod = Literal["auto", "fork", "forkserver", "spawn"]
Returns = Literal["first", "all", "none"]
View = Literal["auto", "widget", "text", "none"]
OnHang = Literal["tell", "raise"]

START_METHODS: tuple[StartMethod, ...] = ("auto", "fork", "forkserver", "spawn")
RETURNS: tuple[Returns, ...] = ("first", "all", "none")
ON_HANG: tuple[OnHang, ...] = ("tell", "raise")
VIEWS: tuple[View, ...] = ("auto", "widget", "text", "none")
_LIBRARIES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a run meet; `port` None or 0 is any free port.

    `num_nodes` is an integer or, until the job was checked, "min:max". Then it is the most nodes, and `min_nodes` the
    fewest with which the run goes on; 0 where their number is fixed.
    """

    address: str = "127.0.0.1"
    port: str | int | None = None
    node_rank: int = 0
    num_nodes: Any = 1
    min_nodes: int = 0
    backend: str = "static"
    endpoint: str = ""
    run_id: str = "none"
    settings: Mapping[str, Any] | None = None

    @property
    def is_elastic(self) -> bool:
        """Whether nodes may join and leave, of a job that was checked."""
        return self.min_nodes > 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A function, its arguments and how to run it, as asked for; `preflight.checked` makes it ready to run.

    `num_processes` is per node, None the number of devices. `environment` is set in the workers alone;
    `quiet` leaves out the line that announces the run. `background` says that this process goes on meanwhile;
    `serve` is what processes that stay do instead of calling the function; see `Seat`. `holds` are the devices that are
    the run's alone, as CUDA_VISIBLE_DEVICES names them, empty on CPUs. `log_dir` is the folder for files of output,
    None where there are none. `hang_timeout` is in seconds, None for never. `engine` is the name of what starts the
    processes, of a job that was checked the engine itself; `address` is where a cluster is that it starts them on.
    `tpu_mode` says whether each of a TPU's chips has a process, or one process uses all.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    num_processes: int | None = None
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
    quiet: bool = False
    background: bool = False
    serve: Callable[..., None] | None = None
    holds: tuple[str, ...] = ()
    log_dir: str | os.PathLike[str] | None = None
    hang_timeout: float | None = 300.0
    on_hang: OnHang = "tell"
    engine: str | Engine = "auto"
    address: str | None = None
    tpu_mode: tpu.Mode = "process"

    @property
    def name(self) -> str:
        """Return the function's name, for messages."""
        return getattr(self.function, "__qualname__", None) or type(self.function).__name__

    @property
    def local_world_size(self) -> int:
        """Return the number of processes on this node of a job that was checked."""
        assert self.num_processes is not None
        return self.num_processes

    @property
    def device_kind(self) -> devices.DeviceKind:
        """Return what the workers run on: their own environment counts more than this process's.

        What the engine runs on counts most.

        ValueError where one of them says no truth word of ACCELERATE_USE_CPU.
        """
        bound: devices.DeviceKind | None = getattr(self.engine, "device_kind", None)
        shards = self.tpu_mode == "spmd" and "tpu_mode" not in getattr(self.engine, "refuses", ())
        if bound is not None or shards:
            return bound or devices.XLA
        return devices.best(environ.flag_in(self.environment, "ACCELERATE_USE_CPU"))

    @property
    def distributed(self) -> bool:
        """Whether processes of their own run the function, of a job that was checked."""
        return self.needs_workers if isinstance(self.engine, str) else self.engine.has_workers

    @property
    def needs_workers(self) -> bool:
        """Whether this process cannot run the function itself: a library that shards needs others for one, too."""
        shards = any(environ.flag_in(self.environment, name) for name in _LIBRARIES)
        several = self.local_world_size > 1 or self.rendezvous.num_nodes > 1 or self.rendezvous.is_elastic
        return (
            several
            or shards
            or self.background
            or self.serve is not None
            or self.log_dir is not None
            or self.on_hang == "raise"
        )
