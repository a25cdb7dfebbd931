"""The environment of a worker: what torch's own launchers set, and what the job adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ... import devices, environ, probes
from ...takeover import finder
from ...topology import Topology
from ...trust import secret
from ..checks import addresses
from ..job import Job
from ..script import Script

_RECORDS_COLLECTIVES: Final = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""For reports of hangs: torch before 2.11 records nothing of gloo without it."""
_OF_TORCHRUN: Final[Mapping[str, str]] = {"ROLE_NAME": "default", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What scripts find under torchrun, and may overrule: `1` ends a process whose collective failed."""


def list_rank_variables(
    place: Topology, job: Job, *, address: str, port: int, attempt: int
) -> dict[str, str]:
    """Return the variables that tell a worker its rank, as torchrun sets them.

    Args:
        place: the worker's ranks, and the sizes of the run.
        job: what is launched.
        address: host of the store where the ranks meet; a process of the run holds it.
        port: of that store.
        attempt: how often the workers were started before.

    Returns:
        Values by variable.
    """
    values = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.num_nodes,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
        "TORCHELASTIC_RUN_ID": job.rendezvous.run_id,
    }
    if isinstance(job.function, Script):
        values |= {"ROLE_RANK": place.rank, "ROLE_WORLD_SIZE": place.world_size}
    else:
        values["FORK_LAUNCHED"] = 1
    return {name: str(value) for name, value in values.items()}


def make_environment(
    job: Job,
    own: Mapping[str, str],
    rank_variables: Mapping[str, str],
    *,
    is_alone: bool,
    interface: str | None = None,
) -> dict[str, str]:
    """Return all variables of a worker.

    Args:
        job: adds its own.
        own: this process's variables.
        rank_variables: those of the worker, from `list_rank_variables`.
        is_alone: whether this node is the run's only one: then gloo uses the loopback interface.
        interface: the network interface by which this node reaches the others.

    Returns:
        Values by variable. What the job and this process say of interfaces and threads counts more than our choice.
    """
    choices = {"OMP_NUM_THREADS": str(count_threads(job))}
    if not probes.at_least("torch", "2.11"):
        choices |= _RECORDS_COLLECTIVES
    if isinstance(job.function, Script):
        choices |= _OF_TORCHRUN
    if interface and not is_alone:
        choices["NCCL_SOCKET_IFNAME"] = interface
    if interface := addresses.find_loopback_interface() if is_alone else interface:
        choices["GLOO_SOCKET_IFNAME"] = interface
    own = {name: text for name, text in own.items() if name != secret.VARIABLE}  # workers need no proof
    return finder.complete_variables({**choices, **own, **job.environment, **rank_variables})


def count_threads(job: Job) -> int:
    """Return the threads for each worker's CPU kernels: what the user asks of OpenMP, else its share of the cores."""
    said = job.environment.get("OMP_NUM_THREADS") or environ.get("OMP_NUM_THREADS") or ""
    asked = said.split(",")[0].strip()
    threads = int(asked) if asked.isdecimal() and len(asked) < 10 else 0
    return threads or devices.share_of_cores(job.local_world_size)
