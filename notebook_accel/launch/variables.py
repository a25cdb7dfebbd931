"""The environment of a worker: what torch's own launchers set, and what the job adds."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from .. import devices, environ
from . import addresses
from .job import Job


def of_worker(
    job: Job, own: Mapping[str, str], *, alone: bool, interface: str | None = None, **values: object
) -> dict[str, str]:
    """Return all variables of a worker.

    Args:
        job: adds its own.
        own: this process's variables.
        alone: whether this node is the run's only one: then gloo uses the loopback interface.
        interface: that by which this node reaches the others.
        values: variables of this worker, by name.
    """
    if sys.platform == "win32":
        values["USE_LIBUV"] = 0  # torch's builds for Windows lack it
    texts = {name: str(value) for name, value in {**values, "FORK_LAUNCHED": 1}.items()}
    fallbacks = {"OMP_NUM_THREADS": str(threads(job))}
    if interface and not alone:
        fallbacks["NCCL_SOCKET_IFNAME"] = interface
    if interface := addresses.loopback_interface() if alone else interface:
        fallbacks["GLOO_SOCKET_IFNAME"] = interface
    return {**fallbacks, **own, **job.environment, **texts}


def threads(job: Job) -> int:
    """Return the threads for each worker's CPU kernels: what the user asks of OpenMP, else its share of the cores."""
    said = job.environment.get("OMP_NUM_THREADS") or environ.get("OMP_NUM_THREADS") or ""
    asked = said.split(",")[0].strip()
    return int(asked) if asked.isdecimal() and int(asked) else devices.share_of_cores(job.local_world_size)
