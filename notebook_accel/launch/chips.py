"""What a process does to compute on XLA devices as part of a run, before the function.

It stands on these parts of torch_xla 2.9: `torch_xla._internal.pjrt.initialize_multiprocess` and
`initialize_singleprocess`, which `torch_xla.launch` calls in each process that it starts, and `runtime.use_spmd`. The
first is not public, but there is nothing else that tells a process its chip.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from .. import environ, probes, tpu
from ..errors import LaunchError
from . import signals

_OF_ONE_PROCESS: Final = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")


def join() -> None:
    """Make this process the one of its chip, as its local rank says.

    Variables of a machine whose chips belong to one process (Kaggle's say `local`) would keep torch_xla from telling
    the processes of a run apart.

    Raises:
        LaunchError: the process has several devices, each of which would need a thread that runs the function.
    """
    environ.drop("XLA_USE_SPMD")  # of the notebook's own process, where that shards
    local_rank, count = environ.integer("LOCAL_RANK", 0), environ.integer("LOCAL_WORLD_SIZE", 1)
    if count == 1:
        from torch_xla._internal import pjrt

        pjrt.initialize_singleprocess()
        return
    environ.drop(*_OF_ONE_PROCESS, "TPU_VISIBLE_CHIPS")
    from torch_xla import runtime as xla
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, count)
    if (found := xla.addressable_device_count()) != 1:
        raise LaunchError(
            f"rank {environ.get('RANK')} has {found} XLA devices, and one process can use one: tpu_mode='spmd' uses "
            "all devices from one process"
        )


def shard() -> None:
    """Let this process use all devices of the machine, each tensor on one or in parts on several.

    Raises:
        LaunchError: its runtime was started for one device already.
    """
    if not is_started():
        environ.drop("XLA_USE_SPMD")  # as another process set it, of which torch_xla would warn
        from torch_xla import runtime as xla

        xla.use_spmd()
    elif not is_sharding():
        raise LaunchError(
            "the XLA runtime was started without SPMD in this process, which cannot change it: leave engine out"
        )


def is_loaded() -> bool:
    """Whether this process has torch_xla."""
    return "torch_xla" in sys.modules


def load() -> bool:
    """Import torch_xla where it is not there yet, which takes seconds of one core; return whether this was so.

    Workers that are forked after it have it. What it sets in the environment stays and is theirs too; it starts no
    runtime. Where it cannot be imported, the worker that needs it says why.
    """
    if is_loaded():
        return False
    with signals.interrupt_held(), contextlib.suppress(Exception):
        importlib.import_module("torch_xla")
    return True


def is_started() -> bool:
    """Whether this process has started XLA's runtime; a TPU's chips belong to it from then on."""
    bindings: Any = sys.modules.get("_XLAC")
    return bindings is not None and bool(bindings._xla_runtime_is_initialized())


def is_sharding() -> bool:
    """Whether this process, which has started the runtime, called `torch_xla.runtime.use_spmd` before."""
    return environ.flag("XLA_USE_SPMD")


def variables(mode: tpu.Mode) -> dict[str, str]:
    """Return what a process of a run on XLA devices is told."""
    return {"ACCELERATE_TORCH_DEVICE": "xla", "NOTEBOOK_ACCEL_TPU_MODE": mode}


def missing(environment: Mapping[str, str]) -> list[str]:
    """Return what has to be there for XLA and is not; `environment` is the workers' own."""
    if not probes.is_available("torch_xla"):
        what = "this machine has a TPU, and" if tpu.is_here() else "XLA devices are used by"
        return [
            f"{what} torch_xla{', which computes on it,' if tpu.is_here() else ', which'} is not installed: "
            "pip install 'torch_xla[tpu]'; ACCELERATE_USE_CPU=1 in the environment runs on CPU processes instead"
        ]
    if not tpu.pjrt_device(environment):
        return ["no TPU was found on this machine; PJRT_DEVICE=CPU in the environment tries XLA on the CPU"]
    return []
