"""The dry launch of ACCELERATE_DEBUG_MODE: start the workers, initialise state and device in each, report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from ..errors import DeviceGuardError
from . import kernel_state
from .job import Job
from .start import launch


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one worker of the dry launch found."""

    rank: int
    world_size: int
    device: str
    backend: str
    pid: int


def dry_launch(job: Job) -> list[Report]:
    """Launch a function that only initialises state and device, print what each rank reports.

    Raises:
        DeviceGuardError: it failed; the message names what initialised a device in this process, where something
            did. Nothing of the job has run.
    """
    if not job.distributed:
        return []
    unclean = kernel_state.reasons()
    probe = replace(job, function=_probe, args=(), returns="all", max_restarts=0, quiet=True)
    try:
        reports: list[Report] = launch(probe, [])
    except Exception as error:
        why = "".join(f"\n  - in this process {reason}" for reason in unclean)
        raise DeviceGuardError(
            f"the dry launch of {job.local_world_size} processes ({job.start_method}) failed with "
            f"{type(error).__name__}: {error}{why}"
        ) from error
    for report in reports:
        print(
            f"dry launch: rank {report.rank} of {report.world_size}, {report.device}, {report.backend}, "
            f"process {report.pid}"
        )
    for reason in unclean:
        print(f"dry launch: {job.start_method} is used, because in this process {reason}")
    sys.stdout.flush()
    return reports


def _probe() -> Report:
    import os

    import torch

    from ..state import PartialState

    state = PartialState()
    torch.ones(1, device=state.device).add_(1)
    state.wait_for_everyone()
    return Report(
        rank=state.process_index,
        world_size=state.num_processes,
        device=str(state.device),
        backend=str(state.backend),
        pid=os.getpid(),
    )
