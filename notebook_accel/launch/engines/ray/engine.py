"""Ranks on a Ray cluster: Ray places an actor for each and gives it GPUs; processes, streams and errors are ours."""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from .... import environ, probes
from ....config.launch_options import StartMethod
from ....devices import DeviceKind
from ....errors import LaunchError
from ....takeover import finder
from ... import children
from ...agent.orders import find_directory
from ...agent.parent_state import ParentState, list_path
from ...job import Job
from ...supervise.worker_group import Attempt
from ...transfer.unpicklable import pack_job
from ..attempts import GroupEngine, Wait
from ..remote.rank_process import Notes, ProcessStart
from . import cluster
from .actor import RankActor
from .ray_group import Plan, RayWorkerGroup

_LOOSER: Final = {
    "STRICT_SPREAD": "let nodes have several: engine=RayEngine(placement='SPREAD')",
    "STRICT_PACK": "let them be on several nodes: engine=RayEngine(placement='PACK')",
}


class RayEngine(GroupEngine[Plan]):
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
    on_this_node = False
    start_methods: ClassVar[tuple[StartMethod, ...]] = ()
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
        resources = self._choose_resources(options["environment"] or {}, nodes)
        return max(1, cluster.count_room(nodes, resources, self._placement))

    def problems(self, job: Job) -> Sequence[str]:
        """Return that there is no cluster, or that it is too small."""
        try:
            cluster.connect(job.address)
        except LaunchError as error:
            return [str(error)]
        if problem := self._check_runtime_env():
            return [problem]
        if self._autoscales:
            return []
        nodes = cluster.list_nodes()
        shortage = _describe_shortage(
            job, nodes, self._choose_resources(job.environment, nodes), self._placement
        )
        return [shortage] if shortage else []

    @contextlib.contextmanager
    def plan(self, job: Job) -> Iterator[Plan]:
        """Put the function and all that the ranks need into Ray's store; ShipError where that cannot be pickled."""
        import ray

        pickled = pack_job(job.function, job.args, job.name)
        state = ParentState.capture(job)
        notes = Notes(
            settings=state.settings,
            sources=state.sources,
            child_start_method=children.choose_start_method(),
            in_background=job.background,
        )
        resources = self._choose_resources(job.environment, cluster.list_nodes())
        yield Plan(
            resources=resources,
            placement=self._placement,
            runtime_env=self._runtime_env,
            timeout=self._timeout,
            endpoint=self._endpoint,
            payload=ray.put([pickle.PickleBuffer(pickled.data), *pickled.buffers]),
            notes=pickle.dumps(notes),
            start=ProcessStart(
                variables={
                    **({} if resources.get("GPU") else {"ACCELERATE_USE_CPU": "true"}),
                    **({finder.VARIABLE: "true"} if finder.is_installed() else {}),
                    **job.environment,
                },
                directory=state.directory or find_directory(),
                path=list_path(),
                with_ipython="IPython" in sys.modules,
            ),
        )

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return how many actors start, and what each gets."""
        count = job.local_world_size
        actors = "actor" if count == 1 else "actors"
        return (
            f"Launching {job.name} on {count} Ray {actors} ({cluster.format_resources(plan.resources)} each)."
        )

    def make_group(self, plan: Plan, attempt: Attempt) -> RayWorkerGroup:
        """Return the actors of an attempt."""
        return RayWorkerGroup(attempt, plan)

    def find_obstacle(self, job: Job, plan: Plan, wait: Wait) -> str:
        """Return that the nodes which are left have too little room, empty where they have enough."""
        if self._autoscales:
            return ""
        try:
            nodes = cluster.list_nodes()
        except LaunchError as error:
            return str(error)
        return _describe_shortage(job, nodes, plan.resources, plan.placement)

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

    def _choose_resources(
        self, environment: Mapping[str, str], nodes: Sequence[cluster.Node]
    ) -> dict[str, float]:
        """Return what each rank gets, by Ray's names."""
        said = environ.flag_in(environment, "ACCELERATE_USE_CPU")
        use_cpu = environ.flag("ACCELERATE_USE_CPU") if said is None else said
        return cluster.choose_resources(nodes, use_cpu, self._resources)


def _describe_shortage(
    job: Job, nodes: Sequence[cluster.Node], resources: Mapping[str, float], placement: str
) -> str:
    """Return that the nodes have too little room for a job, empty where they have enough."""
    room = cluster.count_room(nodes, resources, placement)
    if job.local_world_size <= room:
        return ""
    less = "give each less: engine=RayEngine(resources_per_worker={'CPU': 0.5})"
    more = _LOOSER.get(placement) or less
    return (
        f"num_processes={job.local_world_size}: each needs {cluster.format_resources(resources)}, and Ray has room for "
        f"{room} ({placement}; {cluster.format_nodes(nodes, resources)}); use fewer, {more}, or say "
        "RayEngine(autoscales=True) of a cluster that grows"
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
