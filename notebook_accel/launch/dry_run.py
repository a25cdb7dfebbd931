"""The dry launch of ACCELERATE_DEBUG_MODE: starts workers, initialises state and device in each, and prints both."""

from __future__ import annotations

from dataclasses import replace

from ..errors import DeviceGuardError
from .checks import fork_obstacles
from .engines.base import Engine
from .job import Job
from .registry import open_run


def launch(job: Job, engine: Engine) -> None:
    """Launch a function that only initialises state and device, and print what each rank reports.

    Args:
        job: what is to run after the dry launch. Where it runs in this process, there is none.
        engine: starts the processes.

    Raises:
        DeviceGuardError: the dry launch failed. The job has not run. The message names what initialised a device in
            this process, if anything did.
    """
    if not job.distributed:
        return
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
        lines: list[str] = open_run(probe, engine, []).call()
    except Exception as error:
        why = "".join(f"\n  - in this process {reason}" for reason in unclean)
        raise DeviceGuardError(
            f"the dry launch of {job.local_world_size} processes ({job.start_method}) failed with "
            f"{type(error).__name__}: {error}{why}"
        ) from error
    lines += [f"{job.start_method} is used, because in this process {reason}" for reason in unclean]
    print(*(f"dry launch: {line}" for line in lines), sep="\n", flush=True)


def _probe() -> str:
    import os

    import torch

    from ..state import PartialState

    state = PartialState()
    torch.ones(1, device=state.device).add_(1)
    state.wait_for_everyone()
    rank = f"rank {state.process_index} of {state.num_processes}"
    return f"{rank}, {state.device}, {state.backend}, process {os.getpid()}"
