"""The library deepspeed: imported when an Accelerator needs it, and readied for this process."""

from __future__ import annotations

import warnings
from typing import Any, Final

import torch
from torch.distributed import distributed_c10d

from .. import devices, environ, probes
from ..comm import torch_dist
from . import order

_OUTDATED: Final = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"

NOT_INSTALLED: Final = (
    "DeepSpeed is not installed: with torch there, pip install 'setuptools>=77', then pip install "
    "--no-build-isolation 'notebook-accel[deepspeed]'"
)


def load(device: torch.device) -> Any:
    """Return the module deepspeed, ready to train on the device in the process group of this process.

    A process that is alone gets a group of its own.

    Raises:
        ImportError: it is not installed.
    """
    if not probes.is_available("deepspeed"):
        raise ImportError(NOT_INSTALLED)
    # rather than a GPU of this machine that was not asked for
    kind = "cpu" if device.type == "cpu" and environ.get("DS_ACCELERATOR") is None else None
    with environ.patch_environment(ds_accelerator=kind):
        import deepspeed
        from deepspeed import comm

        _without_shared_memory(deepspeed, device)
        # said at every collective by torch, of what deepspeed calls
        warnings.filterwarnings("ignore", message=_OUTDATED, category=FutureWarning)
        if not torch.distributed.is_initialized():
            backend = devices.kind_of(device.type).backend
            torch_dist.open_group_of_one(device, backend or devices.CPU.backend)
        _forget_closed_groups(deepspeed)
        if not comm.is_initialized():
            comm.init_distributed(
                dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False
            )
        if device.type == "cpu":
            order.keep(comm.comm.cdb)
    return deepspeed


def give_rank() -> bool:
    """Say LOCAL_RANK to deepspeed in a process that nobody launched; return whether that was missing."""
    is_missing = environ.get("LOCAL_RANK") is None
    if is_missing:
        environ.put({"LOCAL_RANK": "0"})
    return is_missing


def take_rank() -> None:
    """Undo `give_rank`."""
    environ.drop("LOCAL_RANK")


def _without_shared_memory(deepspeed: Any, device: torch.device) -> None:
    """Leave out an operator for inference on CPUs that deepspeed would compile before it trains."""
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _forget_closed_groups(deepspeed: Any) -> None:
    """Let deepspeed make its copy of the process group anew where the one it keeps was of an earlier group."""
    groups = deepspeed.utils.groups
    if groups._WORLD_GROUP is not None and groups._WORLD_GROUP not in distributed_c10d._world.pg_map:
        groups._WORLD_GROUP = None
