"""Jobs for tests that need one without a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from notebook_accel import devices
from notebook_accel.launch.job import Job


def make_job(function: Callable[..., Any] = print, local_world_size: int = 1, **options: Any) -> Job:
    """Return a job of CPU processes; one process is this process, unless `options` says otherwise."""
    defaults = {
        "name": getattr(function, "__qualname__", "function"),
        "device_kind": devices.CPU,
        "distributed": local_world_size > 1 or options.get("background", False),
    }
    return Job(function=function, local_world_size=local_world_size, **{**defaults, **options})
