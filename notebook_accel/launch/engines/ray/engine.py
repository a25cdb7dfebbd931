"""Ranks on a Ray cluster: Ray places an actor for each and gives it GPUs; processes, streams and errors are ours."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .... import probes
from ....devices import DeviceKind
from ....errors import LaunchError
from ...job import Job
from ...supervise.worker_group import Attempt
from ...transfer.pickled import Pickled
from ..remote.hosts_engine import HostsEngine, Origin, uses_cpu
from ..remote.hosts_group import Lender, Plan
from . import cluster
from .actor import RankActor
from .ray_nodes import RayNodes, RayWorkerGroup, Wish


class RayEngine(HostsEngine):
    """Starts a Ray actor per rank, in a placement group.

    Args:
        placement: Ray's strategy: `PACK` uses few nodes, `SPREAD` many, `STRICT_PACK` one, `STRICT_SPREAD` one for
            each rank.
        resources_per_worker: what each rank gets, by Ray's names (`{"CPU": 4, "GPU": 1}`); None is a CPU, and a GPU
            where the cluster has any and ACCELERATE_USE_CPU is not set.
        timeout: seconds to wait for resources that others use.
        autoscales: whether the cluster adds nodes when more is asked for than it has: then that is no error, and the
            launch waits for `timeout`.
        runtime_env: Ray's runtime environment of the actors.
        notebook_address: `host:port` at which the cluster's nodes reach this process; port 0, or none, is a free one.
            None finds it out.

    Raises:
        ValueError: Ray is not installed, or an argument is wrong.
    """

    name = "ray"
    refuses: ClassVar[Mapping[str, str]] = {
        "num_nodes": "Ray chooses the nodes, num_processes is the number of ranks on all of them",
        "rdzv_conf": "Ray knows when its nodes are there, RayEngine(timeout=seconds) says how long it is waited for",
        "secret": "ranks prove a key that Ray gives them",
    }

    def __init__(
        self,
        *,
        placement: str = "PACK",
        resources_per_worker: Mapping[str, float] | None = None,
        timeout: float = 60.0,
        autoscales: bool = False,
        runtime_env: Mapping[str, Any] | None = None,
        notebook_address: str | None = None,
    ) -> None:
        if not probes.is_available("ray"):
            raise ValueError("engine='ray': Ray is not installed: pip install \"notebook-accel[ray]\"")
        if placement not in cluster.PLACEMENTS:
            raise ValueError(
                f"placement={placement!r}: choose among {', '.join(map(repr, cluster.PLACEMENTS))}"
            )
        asked = resources_per_worker
        if asked is not None and not (asked and all(amount > 0 for amount in asked.values())):
            raise ValueError(f"resources_per_worker={asked!r}: a number above 0 is needed for each resource")
        self._placement = placement
        self._resources = asked
        self._timeout = float(timeout)
        self._autoscales = autoscales
        self._runtime_env = None if runtime_env is None else dict(runtime_env)
        self._endpoint = _parse_endpoint(notebook_address)

    def count(self, options: Mapping[str, Any], kind: DeviceKind) -> int:
        """Return how many workers the whole cluster has room for: its GPUs by default, without any its CPUs."""
        cluster.connect(options["address"])
        nodes = cluster.list_nodes()
        resources = cluster.choose_resources(nodes, uses_cpu(options["environment"] or {}), self._resources)
        return max(1, cluster.count_room(nodes, resources, self._placement))

    def problems(self, job: Job) -> Sequence[str]:
        """Return that there is no cluster, or that it is too small."""
        try:
            cluster.connect(job.address)
        except LaunchError as error:
            return [str(error)]
        if problem := self._check_runtime_env():
            return [problem]
        nodes = cluster.list_nodes()
        shortage = self._make_wish(job, nodes).find_shortage(nodes)
        return [shortage] if shortage else []

    def count_ranks(self, job: Job) -> list[int]:
        """Return that each rank has an actor of its own."""
        return [1] * job.local_world_size

    def make_lender(self, job: Job) -> RayNodes:
        """Return what has the actors of a run."""
        return RayNodes(self._make_wish(job, cluster.list_nodes()))

    def make_plan(
        self, job: Job, pickled: Pickled, origin: Origin, lender: Lender, *, ends_with_group: bool = False
    ) -> Plan:
        """Put the function into Ray's store, from which each node gets it once."""
        import ray

        assert isinstance(lender, RayNodes)
        lender.take(origin.start, ray.put([pickle.PickleBuffer(pickled.data), *pickled.buffers]))
        return super().make_plan(
            job, Pickled(data=b"", buffers=[]), origin, lender, ends_with_group=ends_with_group
        )

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return how many actors start, and what each gets."""
        resources = self._make_wish(job, cluster.list_nodes()).resources
        actors = "actor" if job.local_world_size == 1 else "actors"
        each = cluster.format_resources(resources)
        return f"Launching {job.name} on {job.local_world_size} Ray {actors} ({each} each)."

    def make_group(self, plan: Plan, attempt: Attempt) -> RayWorkerGroup:
        """Return the actors of an attempt."""
        return RayWorkerGroup(attempt, plan)

    def _check_runtime_env(self) -> str:
        """Return what Ray has against the runtime environment, empty where it takes it."""
        import ray

        try:
            ray.remote(RankActor).options(runtime_env=self._runtime_env)
        except (TypeError, ValueError) as error:
            why = cluster.find_telling_line(str(error)).rstrip(".")
            return (
                f"RayEngine(runtime_env=...): {why}; folders of this machine go to ray.init(runtime_env=...), before "
                "the launch"
            )
        return ""

    def _make_wish(self, job: Job, nodes: Sequence[cluster.Node]) -> Wish:
        return Wish(
            count=job.local_world_size,
            resources=cluster.choose_resources(nodes, uses_cpu(job.environment), self._resources),
            placement=self._placement,
            runtime_env=self._runtime_env,
            timeout=self._timeout,
            autoscales=self._autoscales,
            endpoint=self._endpoint,
        )


def _parse_endpoint(address: str | None) -> tuple[str, int] | None:
    """Return host and port, 0 for any free one; None where no address is given."""
    if address is None:
        return None
    host, colon, digits = address.rpartition(":")
    if not colon:
        host, digits = address, "0"
    if not host or not digits.isdecimal() or int(digits) > 65535:
        raise ValueError(
            f"notebook_address={address!r}: host:port is needed, as the cluster's nodes see this machine"
        )
    return host.strip("[]"), int(digits)
