"""The actors of a run on a Ray cluster, which are its hosts: placed by Ray, joined to the notebook by TCP."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ....errors import LaunchError
from ....stream.listener import Listener
from ... import descriptors
from ...checks import addresses
from ...supervise.worker_group import Attempt
from ..attempts import Wait
from ..remote.client import Client
from ..remote.hosts_group import HostMember, HostsWorkerGroup, Lender, Plan
from ..remote.link import Link
from ..remote.messages import Devices
from ..remote.rank_process import ProcessStart, find_version
from ..remote.transport import SocketTransport
from . import cluster
from .actor import RankActor

_LOOK_SECONDS: Final = 0.1
_TELL_SECONDS: Final = 3.0  # without the resources, until the cell says what the launch waits for
_START_SECONDS: Final = (
    300.0  # for an actor's process, once it has its resources: its environment may be made first
)
_EXPLAIN_SECONDS: Final = 40.0  # Ray takes about half of that to declare a silent node dead
_ASK_SECONDS: Final = 1.0
_LOOSER: Final = {
    "STRICT_SPREAD": "let nodes have several: engine=RayEngine(placement='SPREAD')",
    "STRICT_PACK": "let them be on several nodes: engine=RayEngine(placement='PACK')",
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What Ray is asked for.

    Attributes:
        count: number of actors.
        resources: of each, by Ray's names.
        placement: Ray's strategy, one of `cluster.PLACEMENTS`.
        runtime_env: Ray's runtime environment of the actors.
        timeout: seconds to wait for resources that others use, or that are to come.
        autoscales: whether the cluster adds nodes when more is asked for than it has.
        endpoint: host, and port or 0, at which the nodes reach this process; None finds it out.
    """

    count: int
    resources: Mapping[str, float]
    placement: str
    runtime_env: Mapping[str, Any] | None
    timeout: float
    autoscales: bool
    endpoint: tuple[str, int] | None

    def describe(self) -> str:
        """Return what is asked for, and what is free, as a clause."""
        resources = cluster.format_resources(self.resources)
        free = cluster.describe_free()
        return f"{self.count} x ({resources}) on Ray ({self.placement}; free now: {free})"

    def find_shortage(self, nodes: Sequence[cluster.Node]) -> str:
        """Return that the nodes have too little room, empty where they have enough or more may come."""
        room = cluster.count_room(nodes, self.resources, self.placement)
        if self.autoscales or self.count <= room:
            return ""
        less = "give each less: engine=RayEngine(resources_per_worker={'CPU': 0.5})"
        more = _LOOSER.get(self.placement) or less
        return (
            f"num_processes={self.count}: each needs {cluster.format_resources(self.resources)}, and Ray has room for "
            f"{room} ({self.placement}; {cluster.format_nodes(nodes, self.resources)}); use fewer, {more}, or say "
            "RayEngine(autoscales=True) of a cluster that grows"
        )


class RayClient(Client):
    """Ray, which has placed an actor."""

    program: ClassVar[str] = "Ray"
    connection: ClassVar[str] = "connection"
    host_noun: ClassVar[str] = "node"

    def find_telling_line(self, said: Sequence[str]) -> str:
        """Return all that is known here; Ray is asked for more."""
        return "the actor has ended, or its node"


class RayNodes(Lender):
    """The actors of one run: those of an attempt, until the next one or the end.

    Args:
        wish: what is asked of Ray.
    """

    warm_seconds = math.inf

    def __init__(self, wish: Wish) -> None:
        self._wish = wish
        self._start: ProcessStart | None = None
        self._payload: Any = None
        self._placement_group: Any = None
        self._actors: list[Any] = []
        self._served: dict[Link, tuple[Any, Any]] = {}  # actor, and reference of what its `serve` returns
        self._explained_by = math.inf  # when all that is lost has to be explained, by the monotonic clock
        descriptors.keep_from_forks(self)

    def take(self, start: ProcessStart, payload: Any) -> None:
        """Take what the actors need.

        Args:
            start: how the processes of ranks start.
            payload: reference, in Ray's store, of the pickled function with its arguments.
        """
        self._start, self._payload = start, payload

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        return [fd for link in list(self._served) for fd in link.filenos()]

    # -- placing

    def open(self, wait: Wait) -> list[Link]:
        """Return a connection to an actor for each rank; those of a node follow each other."""
        self._release()
        try:
            self._place()
            infos = self._wait_for_actors(wait)
            nodes = list(dict.fromkeys(info["node"] for info in infos))
            order = sorted(range(len(infos)), key=lambda number: nodes.index(infos[number]["node"]))
            self._actors = [self._actors[number] for number in order]
            return self._connect([infos[number] for number in order], wait)
        except BaseException:
            self._release()
            raise

    def _place(self) -> None:
        """Ask Ray for the actors."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        wish, start, rest = self._wish, self._start, dict(self._wish.resources)
        assert start is not None
        options = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "resources": rest}
        if wish.runtime_env is not None:
            options["runtime_env"] = dict(wish.runtime_env)
        self._placement_group = group = ray.util.placement_group(
            [dict(wish.resources) for _ in range(wish.count)], strategy=wish.placement
        )
        kind = ray.remote(RankActor)
        for bundle in range(wish.count):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            actor = kind.options(scheduling_strategy=strategy, **options)
            self._actors.append(actor.remote(start.variables, start.with_ipython))

    def _wait_for_actors(self, wait: Wait) -> list[dict[str, Any]]:
        """Wait until all actors are there; return what each says of its place."""
        import ray

        wish = self._wish
        references = [actor.describe.remote() for actor in self._actors]
        begun = time.monotonic()
        placed_at: float | None = None
        text = ""
        rest = references
        while rest:
            ready, rest = ray.wait(references, num_returns=len(references), timeout=2 * _LOOK_SECONDS)
            for reference in ready:
                _get_answer(reference)
            now = time.monotonic()
            if placed_at is None and (ready or self._placement_group.wait(0)):
                placed_at, text = now, ""
            if placed_at is None and now - begun > wish.timeout:
                raise LaunchError(f"{wish.describe()} did not become free in {wish.timeout:g} s")
            if placed_at is None and now - begun > _TELL_SECONDS and not text:
                text = f"Waiting for {wish.describe()}, {wish.timeout:g} s at most."
            if placed_at is not None and now - placed_at > _START_SECONDS:
                raise LaunchError(
                    f"{len(rest)} of {len(references)} Ray actors have not started in {_START_SECONDS:g} s: "
                    "Ray's logs on their nodes say why"
                )
            wait(text)
        infos: list[dict[str, Any]] = [_get_answer(reference) for reference in references]
        for info in infos:
            if info["version"] != find_version():
                raise LaunchError(
                    f"node {info['address']} has notebook_accel {info['version']}, and this process {find_version()}: "
                    "install the same version on all nodes"
                )
        return infos

    def _connect(self, infos: Sequence[Mapping[str, Any]], wait: Wait) -> list[Link]:
        """Let each actor connect to this process."""
        import ray

        host, port = self._wish.endpoint or (cluster.find_own_address(), 0)
        try:
            listening = (addresses.listen_for_nodes if self._wish.endpoint else addresses.listen)(host, port)
        except OSError as error:
            raise LaunchError(
                f"this process cannot listen at {host}:{port} ({error.strerror or error})"
            ) from None
        links: dict[int, Link] = {}
        gpus = math.ceil(self._wish.resources.get("GPU", 0))
        with contextlib.closing(Listener(listening, len(infos))) as listener:
            endpoint = (host, listener.port)
            served = [
                actor.serve.remote(endpoint, listener.token, number, self._payload)
                for number, actor in enumerate(self._actors)
            ]
            deadline = time.monotonic() + _START_SECONDS  # until Ray has brought the function to all
            while listener.missing:
                for number, connection in listener.admit():
                    info = infos[number]
                    link = Link(RayClient(), info["address"], None, SocketTransport(connection), facts=info)
                    link.devices = Devices(rank=-1, time=time.time(), label="GPU" if gpus else "", count=gpus)
                    links[number] = link
                    self._served[link] = (self._actors[number], served[number])
                missing = {served[number]: number for number in sorted(listener.missing)}
                failed = ray.wait([*missing], timeout=0)[0] if missing else []
                if missing and (failed or time.monotonic() > deadline):
                    late = missing[next(iter(failed or missing))]
                    why = _get_answer(served[late]) if failed else f"no connection in {_START_SECONDS:g} s"
                    raise LaunchError(_describe_unreachable(late, infos[late]["address"], endpoint, why))
                wait("")
                time.sleep(0.005)
        return [links[number] for number in range(len(infos))]

    def take_back(self, link: Link, *, is_clean: bool) -> None:
        """Close the connection: its actor ends what it has."""
        link.close()

    def _release(self) -> None:
        """Give back what Ray has placed; what still runs is killed with its actor."""
        import ray

        for link in self._served:
            link.close()
        with contextlib.suppress(ConnectionError):  # Ray is gone, and all that it had placed
            if cluster.is_up():
                for actor in self._actors:
                    ray.kill(actor)
                if self._placement_group is not None:
                    ray.util.remove_placement_group(self._placement_group)
        self._served, self._actors, self._placement_group = {}, [], None
        self._explained_by = math.inf

    def find_obstacle(self, wait: Wait) -> str:
        """Return that the nodes which are left have too little room, empty where they have enough."""
        try:
            return self._wish.find_shortage(cluster.list_nodes())
        except LaunchError as error:
            return str(error)

    def give_back(self, *, is_stopped: bool) -> None:
        """Give back what Ray has placed."""
        self._release()

    # -- what Ray knows of them

    def list_ended(self, links: Sequence[Link]) -> list[Link]:
        """Return those of some connections whose actor has ended, by what Ray knows now."""
        import ray

        served = {self._served[link][1]: link for link in links}
        with contextlib.suppress(ConnectionError):  # Ray is gone: the connections themselves tell the rest
            if served and cluster.is_up():
                return [served[each] for each in ray.wait([*served], num_returns=len(served), timeout=0)[0]]
        return []

    def explain_loss(self, link: Link, check: Callable[[], None]) -> str:
        """Return what became of an actor whose connection has ended.

        Args:
            link: the connection.
            check: called several times a second.
        """
        try:
            return self._ask_for_loss(link, check)
        except (ConnectionError, LaunchError) as error:
            return f"Ray does not answer any more ({cluster.find_telling_line(str(error))})"

    def _ask_for_loss(self, link: Link, check: Callable[[], None]) -> str:
        """Return what Ray knows of a lost actor; it may have to miss a node for a while first."""
        import ray

        where = f"on node {link.host}"
        actor, answer = self._served[link]
        self._explained_by = min(self._explained_by, time.monotonic() + _EXPLAIN_SECONDS)
        while cluster.is_up() and time.monotonic() < self._explained_by:
            if link.node not in {node.name for node in cluster.list_nodes()}:
                return f"its node {link.host} died, or the cluster took it away"
            if ray.wait([answer], timeout=_ASK_SECONDS)[0]:
                try:
                    ray.get(answer)
                    break
                except (
                    ray.exceptions.ActorUnavailableError
                ):  # Ray does not know yet: its node may be dead too
                    time.sleep(_LOOK_SECONDS)
                    answer = actor.__ray_ready__.remote()
                except ray.exceptions.RayError as error:
                    if link.node in {node.name for node in cluster.list_nodes()}:
                        return (
                            f"its actor {where} was ended, by Ray or from outside ({_find_cause(str(error))})"
                        )
            check()
        why = "Ray does not say why" if cluster.is_up() else "so has the one of this process to Ray"
        return f"its actor {where}: {link.lost}, and {why}"


class RayWorkerGroup(HostsWorkerGroup):
    """The ranks of one attempt on a Ray cluster.

    Args:
        attempt: the job, and the ways to the run.
        plan: what the actors are asked for.
    """

    def __init__(self, attempt: Attempt, plan: Plan) -> None:
        super().__init__(attempt, plan)
        assert isinstance(plan.lender, RayNodes)
        self._lender = plan.lender
        self._next_ask = 0.0

    def on_look(self) -> None:
        """Ask Ray now and then for actors whose connection says nothing: their node may be gone."""
        super().on_look()
        if (now := time.monotonic()) < self._next_ask:
            return
        self._next_ask = now + _ASK_SECONDS
        for link in self._lender.list_ended([member.link for member in self.list_running()]):
            link.lost = link.lost or "its actor has ended"
            self._forget(link)

    def explain_loss(self, member: HostMember) -> str:
        """Return what became of a lost rank, by what Ray knows."""
        return self.describe_loss(member.link)

    def describe_loss(self, link: Link) -> str:
        """Return why a connection has ended, by what Ray knows."""
        return self._lender.explain_loss(link, lambda: self._delivery.deliver([]))


def _get_answer(reference: Any) -> Any:
    """Return what an actor has answered; LaunchError where it could not start."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        text = str(error).strip()
        if "notebook_accel" in text and ("ModuleNotFoundError" in text or "No module named" in text):
            raise LaunchError(
                f"a node of the cluster does not have this notebook_accel ({_find_last_line(text)}): install the "
                "same version on all nodes, or call ray.init(runtime_env={'py_modules': [notebook_accel]}) before"
            ) from None
        raise LaunchError(f"a Ray actor could not start: {_find_last_line(text)}") from None


def _describe_unreachable(rank: int, node: str, endpoint: tuple[str, int], why: str) -> str:
    host, port = endpoint
    return (
        f"rank {rank} on node {node} cannot reach this process at {host}:{port} ({why}): "
        "output and values come by TCP; open a way from the cluster to here and name it, "
        "engine=RayEngine(notebook_address='host:port'), or run the notebook on a machine of the cluster"
    )


def _find_last_line(text: str) -> str:
    return text.splitlines()[-1].strip()[:300] if text else "Ray says nothing more"


def _find_cause(text: str) -> str:
    """Return the sentence of Ray's long account that says why an actor died."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or "exit" in line.lower() or "OOM" in line]
    return (telling or lines or ["Ray does not say why"])[-1].partition(" Some common causes")[0][:300]
