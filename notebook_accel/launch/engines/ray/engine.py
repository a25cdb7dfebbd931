"""Ranks on a Ray cluster: Ray places an actor for each and gives it GPUs; processes, streams and errors are ours."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from .... import environ, probes
from ....errors import LaunchError
from ....events import Phase
from ....stream.record import RunRecord
from ... import crew, failures, signals
from ...control import Control, StopAsked
from ...culprit import pack_job, unpack_value
from ...job import Job, StartMethod
from ...surroundings import Surroundings
from ..base import Deliver, Engine, Outcome
from . import cluster
from .actor import Outset, RankActor
from .child import Notes
from .crew import Plan, RayCrew

_INTERRUPT_GRACE: Final = 1.5
_STOP_GRACE: Final = 0.5
_LOOSER: Final = {
    "STRICT_SPREAD": "let nodes have several: engine=RayEngine(placement='SPREAD')",
    "STRICT_PACK": "let them be on several nodes: engine=RayEngine(placement='PACK')",
}


class RayEngine(Engine):
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
        "num_nodes": "Ray chooses the nodes, num_processes is the number of ranks on all of them"
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
        self._endpoint = _endpoint(notebook_address)

    def count(self, job: Job) -> int:
        """Return how many workers the whole cluster has room for: its GPUs by default, without any its CPUs."""
        cluster.connect(job.address)
        nodes = cluster.nodes()
        return max(1, cluster.capacity(nodes, self._wanted(job, nodes), self._placement))

    def problems(self, job: Job) -> Sequence[str]:
        """Return that there is no cluster, or that it is too small."""
        if sys.platform == "win32":
            return ["engine='ray': it is not written for Windows"]
        try:
            cluster.connect(job.address)
        except LaunchError as error:
            return [str(error)]
        if wrong := self._wrong_runtime_env():
            return [wrong]
        nodes = cluster.nodes()
        resources = self._wanted(job, nodes)
        room = cluster.capacity(nodes, resources, self._placement)
        if job.local_world_size <= room or self._autoscales:
            return []
        return [_too_many(job, nodes, resources, self._placement, room)]

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job; ShipError or LaunchError where it cannot start."""
        import ray

        parcel = pack_job(job.function, job.args, job.name)
        around = Surroundings.capture(job)
        notes = Notes(
            random_states=around.random_states,
            sources=around.sources,
            child_start_method=crew.child_start_method(),
            in_background=job.background,
        )
        resources = self._wanted(job, cluster.nodes())
        plan = Plan(
            resources=resources,
            placement=self._placement,
            runtime_env=self._runtime_env,
            timeout=self._timeout,
            endpoint=self._endpoint,
            parts=ray.put([pickle.PickleBuffer(parcel.pickled), *parcel.buffers]),
            notes=pickle.dumps(notes),
            outset=Outset(
                variables={
                    **({} if resources.get("GPU") else {"ACCELERATE_USE_CPU": "true"}),
                    **job.environment,
                },
                directory=around.directory or os.getcwd(),
                path=tuple(sys.path),
                with_ipython="IPython" in sys.modules,
            ),
        )
        count = job.local_world_size
        what = f"{count} Ray {'actor' if count == 1 else 'actors'} ({cluster.spoken(resources)} each)"
        text = "" if job.quiet else f"Launching {job.name} on {what}."
        deliver([Phase(rank=-1, time=time.time(), name="starting", detail=text)])
        return _attempts(job, plan, record, deliver, control, self._autoscales)

    def _wrong_runtime_env(self) -> str:
        import ray

        try:
            ray.remote(RankActor).options(runtime_env=self._runtime_env)
        except (TypeError, ValueError) as error:
            why = cluster.telling_line(str(error)).rstrip(".")
            return (
                f"RayEngine(runtime_env=...): {why}; folders of this machine go to ray.init(runtime_env=...), before "
                "the launch"
            )
        return ""

    def _wanted(self, job: Job, nodes: Sequence[cluster.Node]) -> dict[str, float]:
        said = environ.flag_in(job.environment, "ACCELERATE_USE_CPU")
        use_cpu = environ.flag("ACCELERATE_USE_CPU") if said is None else said
        return cluster.wanted(nodes, use_cpu, self._resources)


def _attempts(
    job: Job, plan: Plan, record: RunRecord, deliver: Deliver, control: Control, autoscales: bool
) -> Outcome:
    """Start all ranks, and start them again where one failed and restarts are left."""
    hang = ""
    for attempt in range(job.max_restarts + 1):
        if attempt:
            cause = hang.partition("\n")[0] or failures.one_line(failures.first(record.failures))
            short = None if autoscales else _shortage(job, plan)
            if short is not None:
                text = f"no restart {attempt} of {job.max_restarts}: {short}"
                deliver([Phase(rank=-1, time=time.time(), name="starting", detail=text)])
                break
            text = f"{cause}; restart {attempt} of {job.max_restarts}"
            deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=text)])
        ranks = RayCrew(job, plan, record, deliver, control, attempt)
        state = "stopped"
        try:
            ranks.start()
            state = ranks.watch()
            if state in ("failed", "hung"):
                ranks.settle()
            elif state == "stopped":
                ranks.stop(_STOP_GRACE)
        except StopAsked:
            pass
        finally:
            with signals.interrupt_held():
                ranks.stop(_INTERRUPT_GRACE)
                ranks.close()
        hang = ranks.hang
        if state not in ("failed", "hung"):
            break
    stopped = frozenset(ranks.stopped_ranks)
    if record.failures:
        return Outcome(failures=tuple(record.failures), stopped=stopped)
    if hang:
        return Outcome(stopped=stopped, hang=hang)
    values = {rank: unpack_value(result) for rank, result in record.results.items()}
    return Outcome(values=values, stopped=stopped, was_stopped=state == "stopped")


def _shortage(job: Job, plan: Plan) -> str | None:
    """Return that the nodes which are left do not suffice, None where they do."""
    try:
        nodes = cluster.nodes()
    except LaunchError as error:
        return str(error)
    room = cluster.capacity(nodes, plan.resources, plan.placement)
    if job.local_world_size <= room:
        return None
    return _too_many(job, nodes, plan.resources, plan.placement, room)


def _too_many(
    job: Job, nodes: Sequence[cluster.Node], resources: Mapping[str, float], placement: str, room: int
) -> str:
    less = "give each less: engine=RayEngine(resources_per_worker={'CPU': 0.5})"
    more = _LOOSER.get(placement) or less
    return (
        f"num_processes={job.local_world_size}: each needs {cluster.spoken(resources)}, and Ray has room for "
        f"{room} ({placement}; {cluster.spoken_nodes(nodes, resources)}); use fewer, {more}, or say "
        "RayEngine(autoscales=True) of a cluster that grows"
    )


def _endpoint(address: str | None) -> tuple[str, int] | None:
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
