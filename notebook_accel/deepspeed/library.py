"""Imports the library deepspeed when an Accelerator needs it, and sets it up for this process."""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d

from .. import devices, environ, probes
from ..comm import torch_dist
from . import cpu_order

_OUTDATED: Final = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"

NOT_INSTALLED: Final = (
    "DeepSpeed is not installed: with torch there, pip install 'setuptools>=77', then pip install "
    "--no-build-isolation 'notebook-accel[deepspeed]'"
)


def load(device: torch.device) -> Any:
    """Return the module deepspeed, set up to train on a device in the process group of this process.

    A process without a group opens one of its own; where this fails, it is closed again.

    Args:
        device: where this process trains.

    Raises:
        ImportError: it is not installed.
    """
    if not probes.is_available("deepspeed"):
        raise ImportError(NOT_INSTALLED)
    # without the variable deepspeed would take a GPU of this machine, which was not asked for
    kind = "cpu" if device.type == "cpu" and environ.get("DS_ACCELERATOR") is None else None
    with environ.patch_environment(ds_accelerator=kind):
        import deepspeed
        from deepspeed import comm

        _disable_shared_memory(deepspeed, device)
        # torch warns at every collective, because deepspeed calls its old names
        warnings.filterwarnings("ignore", message=_OUTDATED, category=FutureWarning)
        has_group = torch.distributed.is_initialized()
        if not has_group:
            backend = devices.kind_of(device.type).backend
            torch_dist.open_group_of_one(device, backend or devices.CPU.backend)
        try:
            _forget_closed_groups(deepspeed)
            if not comm.is_initialized():
                comm.init_distributed(
                    dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
                )
            if device.type == "cpu":
                cpu_order.order_gathers(comm.comm.cdb)
        except BaseException:
            if not has_group:
                torch.distributed.destroy_process_group()
            raise
    return deepspeed


def set_local_rank() -> bool:
    """Set LOCAL_RANK, which deepspeed requires, to 0 in a process that nobody launched.

    Returns:
        Whether the variable was missing; then `drop_local_rank` has to remove it.
    """
    is_missing = environ.get("LOCAL_RANK") is None
    if is_missing:
        environ.put({"LOCAL_RANK": "0"})
    return is_missing


def drop_local_rank() -> None:
    """Undo `set_local_rank`."""
    environ.drop("LOCAL_RANK")


def _disable_shared_memory(deepspeed: Any, device: torch.device) -> None:
    """Turn off an operator for inference on CPUs; deepspeed would compile it before it trains."""
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _forget_closed_groups(deepspeed: Any) -> None:
    """Drop deepspeed's copy of a process group that was closed, so that it copies the present one."""
    groups = deepspeed.utils.groups
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in distributed_c10d._world.pg_map:
        groups._WORLD_GROUP = None
