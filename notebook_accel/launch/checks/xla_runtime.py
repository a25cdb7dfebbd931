"""Prepares a process of a run for XLA devices, before it calls the function.

It uses three functions of torch_xla 2.9. `torch_xla.launch` calls two of them in each process that it starts:
`torch_xla._internal.pjrt.initialize_multiprocess` and `initialize_singleprocess`. The third is `runtime.use_spmd`. The
first two are not public, but no public function assigns a chip to a process.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from typing import Any, Final

from ... import devices, environ, interrupts, probes, tpu
from ...errors import LaunchError

_SINGLE_PROCESS_VARIABLES: Final = ("TPU_PROCESS_ADDRESSES", "TPU_PROCESS_PORT", "CLOUD_TPU_TASK_ID")


def join() -> None:
    """Assign to this process the chip of its local rank.

    Kaggle and others set variables for a single process that uses all chips. They are removed here: with them torch_xla
    could not tell the processes of a run apart.

    Raises:
        LaunchError: the process would have several devices. It can use only one.
    """
    environ.drop("XLA_USE_SPMD")  # the notebook's own process may have set it for itself
    local_rank, count = environ.integer("LOCAL_RANK", 0), environ.integer("LOCAL_WORLD_SIZE", 1)
    if count == 1:
        from torch_xla._internal import pjrt

        pjrt.initialize_singleprocess()
        return
    environ.drop(*_SINGLE_PROCESS_VARIABLES, "TPU_VISIBLE_CHIPS")
    from torch_xla import runtime as xla
    from torch_xla._internal import pjrt

    pjrt.initialize_multiprocess(local_rank, count)
    if (found := xla.addressable_device_count()) != 1:
        raise LaunchError(
            f"rank {environ.get('RANK')} has {found} XLA devices, and one process can use one: tpu_mode='spmd' uses "
            "all devices from one process"
        )


def shard() -> None:
    """Let this process use all XLA devices of the machine (SPMD). A tensor may be spread over several of them.

    Raises:
        LaunchError: this process has started the XLA runtime without SPMD already.
    """
    if not is_started():
        environ.drop("XLA_USE_SPMD")  # if a parent process has set it, torch_xla would warn
        from torch_xla import runtime as xla

        xla.use_spmd()
    elif not is_sharding():
        raise LaunchError(
            "the XLA runtime was started without SPMD in this process, which cannot change it: leave engine out"
        )


def is_loaded() -> bool:
    """Return whether this process has imported torch_xla."""
    return "torch_xla" in sys.modules


def load() -> bool:
    """Import torch_xla, so that forked workers need not import it: this takes seconds of one core.

    The import does not start the XLA runtime. Environment variables that it sets stay, and the workers get them too. If
    the import fails, nothing is raised here: the worker that needs it will fail.

    Returns:
        Whether the import was tried; False if this process has torch_xla already.
    """
    if is_loaded():
        return False
    with interrupts.delay_interrupt(), contextlib.suppress(Exception):
        importlib.import_module("torch_xla")
    return True


def is_started() -> bool:
    """Return whether this process has started the XLA runtime. From then on the TPU chips belong to this process."""
    bindings: Any = sys.modules.get("_XLAC")
    return bindings is not None and bool(bindings._xla_runtime_is_initialized())


def is_sharding() -> bool:
    """Return whether this process uses SPMD. It must have started the XLA runtime."""
    return environ.flag("XLA_USE_SPMD")


def make_variables(mode: tpu.Mode) -> dict[str, str]:
    """Return the environment variables of the processes of a run on XLA devices.

    Args:
        mode: `process` or `spmd`.
    """
    return {"ACCELERATE_TORCH_DEVICE": "xla", "NOTEBOOK_ACCEL_TPU_MODE": mode}


def find_missing(environment: Mapping[str, str]) -> list[str]:
    """Return what a run on XLA devices needs and this machine does not have.

    Args:
        environment: variables of the launch, which the workers get besides those of this process.

    Returns:
        One sentence for each missing thing; empty if nothing is missing.

    Raises:
        ValueError: torch does not know the device that ACCELERATE_TORCH_DEVICE names.
    """
    wanted = devices.find_requested(environment)
    asks = f"ACCELERATE_TORCH_DEVICE={str(wanted)!r}: " if wanted is not None and wanted.type == "xla" else ""
    if not probes.is_available("torch_xla"):
        what = "this machine has a TPU, and" if tpu.is_here() else "XLA devices are used by"
        return [
            f"{asks}{what} torch_xla{', which computes on it,' if tpu.is_here() else ', which'} is not installed: "
            f"{tpu.advise_install(probes.version('torch') or '')}; ACCELERATE_USE_CPU=1 in the environment runs on CPU "
            "processes instead"
        ]
    if not tpu.pjrt_device(environment):
        text = "no TPU was found on this machine; PJRT_DEVICE=CPU in the environment tries XLA on the CPU"
        return [f"{asks}{text}"]
    return []
