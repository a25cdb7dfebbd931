"""The dry launch of ACCELERATE_DEBUG_MODE: starts workers, initialises state and device in each, and prints both."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from ..errors import DeviceGuardError
from .checks import fork_obstacles
from .engines.base import Engine
from .job import Job
from .registry import open_run


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one worker of the dry launch reports.

    Attributes:
        rank: its rank.
        world_size: the number of ranks.
        device: its device, as torch names it.
        backend: the backend of its process group; `None` without one.
        pid: its process id.
    """

    rank: int
    world_size: int
    device: str
    backend: str
    pid: int


def launch(job: Job, engine: Engine) -> list[Report]:
    """Launch a function that only initialises state and device, and print what each rank reports.

    Args:
        job: what is to run after the dry launch.
        engine: starts the processes.

    Returns:
        One report for each rank; none if the job runs in this process.

    Raises:
        DeviceGuardError: the dry launch failed. The job has not run. The message names what initialised a device in
            this process, if anything did.
    """
    if not job.distributed:
        return []
    unclean = fork_obstacles.reasons()
    probe = replace(
        job,
        function=_probe,
        args=(),
        name=_probe.__name__,
        returns="all",
        max_restarts=0,
        quiet=True,
        options={**job.options, "detach": False},
    )
    try:
        reports: list[Report] = open_run(probe, engine, []).call()
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
