"""Detects topology, device and backend of this process, opens its process group, and installs the runtime."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch

from . import affinity, devices, environ, probes, runtime, topology, tpu
from .comm import torch_dist, xla
from .comm.base import Comm
from .comm.single import SingleComm
from .devices import DeviceKind
from .runtime import Runtime, Settings
from .topology import Topology

OPTIONS: Final = ("backend", "init_method", "timeout")
"""Arguments of `PartialState` for the process group."""


def ensure(cpu: bool = False, **options: Any) -> Runtime:
    """Return the runtime of this process; the first call detects and installs it.

    Args:
        cpu: use no accelerator device.
        options: `backend`, `init_method` and `timeout` (a timedelta) of the process group.

    Raises:
        ValueError: variables contradict each other, the backend does not work here, or a later call has other
            arguments than the first.
        TypeError: an option is unknown.
    """
    given = _check_options(options)
    installed = runtime.current()
    if installed is None:
        installed, for_thread = _make(cpu or environ.flag("ACCELERATE_USE_CPU"), given)
        runtime.install(installed, for_thread=for_thread)
    else:
        _refuse_conflict(installed, cpu, given)
    return installed


def renew(port: int) -> None:
    """Close the process group and open a new one with the same ranks.

    Code that holds the runtime uses the new group from then on. Objects that hold the old group do not, such as a model
    inside DistributedDataParallel.

    Args:
        port: where the ranks meet, at the same address as before.

    Raises:
        RuntimeError: the ranks are on XLA devices, which cannot meet twice.
    """
    current = runtime.current()
    torch_dist.close_group()
    environ.put({"MASTER_PORT": str(port)})
    if current is None:
        current = ensure()
    elif current.device.type == "xla":
        raise RuntimeError("ranks on XLA devices meet once: end these processes and launch new ones")
    elif current.topology.world_size > 1:
        settings = current.settings
        given = {name: value for name, value in settings.group_options.items() if name != "backend"}
        torch_dist.open_group(current.topology, str(settings.backend), device=current.device, **given)
        current.comm = torch_dist.TorchComm(current.device, debug=settings.debug)


def find_runtime(prepared: Any) -> Runtime | None:
    """Return the runtime that an object was prepared in; that of this thread or process, if it was unpickled here.

    Args:
        prepared: an optimizer, a scheduler or a data loader.

    Raises:
        RuntimeError: this is a rank of a run of another number of processes: it would train alone.
    """
    own, of_object = runtime.current(), prepared._runtime
    if own is None or of_object is not own:
        world_size = (own.topology if own is not None else topology.from_environ()).world_size
        if vars(prepared).get("_prepared_for_processes", world_size) != world_size > 1:
            raise RuntimeError(describe_other_run(prepared, world_size))
    return own if of_object is None else of_object


def describe_other_run(prepared: Any, world_size: int) -> str:
    """Return that an object was prepared in a run of another number of processes, and what to do.

    Args:
        prepared: the object.
        world_size: number of processes of this run.
    """
    values = vars(prepared)
    made_at = values.get("_prepared_by")
    place = "" if made_at is None else f" by the Accelerator of {probes.describe_line(*made_at)}"
    kind = type(values.get("optimizer", values.get("scheduler", prepared))).__name__
    return (
        f"this {kind} was prepared in a run of {count_processes(values['_prepared_for_processes'])}"
        f"{place}, and this run has {world_size}: give the function what was not prepared, "
        "and prepare it there"
    )


def count_processes(world_size: int) -> str:
    """Return a number of processes in words."""
    return "1 process" if world_size == 1 else f"{world_size} processes"


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise TypeError(
            f"unknown argument {', '.join(unknown)}: besides cpu, PartialState takes {', '.join(OPTIONS)}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(given.get("timeout", timedelta()), timedelta):
        raise TypeError(f"timeout must be a datetime.timedelta, not {given['timeout']!r}")
    return given


def _make(cpu: bool, options: dict[str, Any]) -> tuple[Runtime, bool]:
    """Return the runtime, and whether it belongs to this thread only."""
    debug = environ.flag("ACCELERATE_DEBUG_MODE")
    has_group = torch_dist.group_exists()
    place = topology.from_group(*torch_dist.group_place()) if has_group else topology.from_environ()
    kind = devices.CPU if cpu else devices.best()
    backend = None
    if place.world_size > 1:
        wanted = torch_dist.group_backend() if has_group else options.get("backend")
        kind, backend = _match(kind, wanted, cpu=cpu)
    if kind is devices.XLA:
        return _make_xla(place, options, debug=debug)
    device = devices.device_for(kind, place.local_rank)
    if device.type == "cuda" and environ.flag("ACCELERATE_CPU_AFFINITY"):
        affinity.set_numa_affinity(place.local_rank)
    comm: Comm = SingleComm(device, debug=debug)
    if place.world_size > 1:
        devices.use(device)
        if not has_group:
            _share_cores(place)
            given = {name: value for name, value in options.items() if name != "backend"}
            torch_dist.open_group(place, str(backend), device=device, **given)
        comm = torch_dist.TorchComm(device, debug=debug, owned=not has_group)
    elif device.index:
        devices.use(device)
    settings = Settings(debug=debug, cpu=cpu, backend=backend, group_options=options)
    return Runtime(topology=place, device=device, comm=comm, settings=settings), False


def _make_xla(given: Topology, options: dict[str, Any], *, debug: bool) -> tuple[Runtime, bool]:
    """Return the runtime of an XLA device, and whether it belongs to this thread only."""
    mode = environ.get("NOTEBOOK_ACCEL_TPU_MODE") or "process"
    if mode not in tpu.MODES:
        raise ValueError(
            f"environment variable NOTEBOOK_ACCEL_TPU_MODE={mode!r}: choose {' or '.join(tpu.MODES)}"
        )
    found = xla.enter(
        spmd=mode == "spmd", local_rank=given.local_rank, local_world_size=given.local_world_size
    )
    if given.world_size > 1 and given.world_size != found.world_size:
        raise ValueError(
            f"WORLD_SIZE is {given.world_size}, but torch_xla joins {found.world_size} device(s), those of PJRT_DEVICE="
            f"{environ.get('PJRT_DEVICE')}: launch a process for each, or set ACCELERATE_USE_CPU=true"
        )
    place = Topology(
        rank=found.rank,
        local_rank=found.local_rank,
        world_size=found.world_size,
        local_world_size=found.local_world_size,
        node_rank=found.node_rank,
        num_nodes=-(-found.world_size // found.local_world_size),
    )
    xla.set_seed(torch.initial_seed())
    several = found.world_size > 1
    comm: Comm = xla.XlaComm(found, debug=debug) if several else SingleComm(found.device, debug=debug)
    settings = Settings(debug=debug, backend="xla", group_options=options)
    feed = xla.XlaFeed(found, speaks=place.is_local_main)
    made = Runtime(topology=place, device=found.device, comm=comm, settings=settings, feed=feed)
    return made, found.has_thread


def _match(kind: DeviceKind, wanted: str | None, *, cpu: bool) -> tuple[DeviceKind, str]:
    """Return a device kind and a backend that work together; a named backend decides."""
    if wanted is None:
        kind = kind if kind.backend else devices.CPU
        return kind, kind.both_backends if _may_gather_on_cpu() else str(kind.backend)
    if kind.backend is not None and kind.backend in wanted:
        return kind, wanted
    if "gloo" in wanted or "mpi" in wanted:
        return devices.CPU, wanted
    if cpu:
        raise ValueError(f"backend {wanted!r} does not work with CPU tensors: choose gloo, or leave cpu out")
    legal = sorted({str(kind.backend), "gloo"} - {"None"})
    raise ValueError(f"backend {wanted!r} does not work on a {kind.label}: choose {' or '.join(legal)}")


def _may_gather_on_cpu() -> bool:
    """Return whether this process may need collectives of CPU tensors later, when the group is up.

    FSDP that offloads adds gradients up on the CPU, and states that are made first, such as those of transformers,
    know nothing of it. In workers of a launch the user does not choose the backend, so they are ready for it.
    """
    offloads = environ.flag("ACCELERATE_USE_FSDP") and environ.flag("FSDP_OFFLOAD_PARAMS")
    return environ.flag("FORK_LAUNCHED") or offloads


def _share_cores(place: Topology) -> None:
    """Limit the threads of this process to its share of the cores, unless OMP_NUM_THREADS sets a number."""
    if not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), devices.share_of_cores(place.local_world_size)))


def _refuse_conflict(installed: Runtime, cpu: bool, options: dict[str, Any]) -> None:
    if cpu and installed.device.type != "cpu":
        raise ValueError(
            f"cpu=True comes too late: this process already uses {installed.device}. "
            "Ask for it where the first Accelerator or PartialState is made"
        )
    if installed.topology.world_size == 1:
        return
    known = {"backend": installed.settings.backend, **installed.settings.group_options}
    for name, value in options.items():
        if value != known.get(name):
            raise ValueError(
                f"{name}={value!r} comes too late: the process group is up with {name}={known.get(name)!r}. "
                "Ask for it where the first Accelerator or PartialState is made"
            )
