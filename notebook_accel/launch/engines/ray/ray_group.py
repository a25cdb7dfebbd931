"""The ranks of one attempt on a Ray cluster: an actor and a process for each, joined to the notebook by TCP."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from ....errors import LaunchError
from ....events import BeginOrder, CallEnd, Event, Failure, LeaveOrder, Order, Phase, Pulse
from ....stream.inbox import Inbox
from ....stream.listener import Listener
from ....topology import Topology
from ... import descriptors
from ...checks import addresses
from ...leftovers import LONGEST_SECONDS
from ...supervise.worker_group import Attempt, Member, WorkerGroup
from ...worker.environment import list_rank_variables
from ..remote.rank_process import ProcessStart, Work, find_version, name_machine
from . import cluster
from .actor import ActorInfo, Assignment, RankActor

_LOOK_SECONDS: Final = 0.1
_TELL_SECONDS: Final = 3.0  # without the resources, until the cell says what the launch waits for
_START_SECONDS: Final = (
    300.0  # for an actor's process, once it has its resources: its environment may be made first
)
_CONNECT_SECONDS: Final = 30.0
_EXPLAIN_SECONDS: Final = 40.0  # Ray takes about half of that to declare a silent node dead
_ASK_SECONDS: Final = 1.0
_LEFT_SECONDS: Final = LONGEST_SECONDS + 2.0  # for actors, to end what their ranks have left running


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the actors are asked for, alike in each attempt.

    Attributes:
        resources: of each worker, by Ray's names.
        placement: Ray's strategy, one of `cluster.PLACEMENTS`.
        runtime_env: Ray's runtime environment of the actors.
        timeout: seconds to wait for resources that others use, or that are to come.
        endpoint: host, and port or 0, at which the nodes reach this process; None finds it out.
        payload: reference, in Ray's store, of the pickled function with its arguments.
        notes: a pickled `Notes`, for each process.
        start: how each process starts.
    """

    resources: Mapping[str, float]
    placement: str
    runtime_env: Mapping[str, Any] | None
    timeout: float
    endpoint: tuple[str, int] | None
    payload: Any
    notes: bytes
    start: ProcessStart


@dataclass(kw_only=True)
class _RayMember(Member):
    """A rank with its actor.

    Attributes:
        actor: Ray's handle of the actor.
        info: where the actor is.
        work: reference, in Ray's store, of what the actor's `work` returns; None before it is called.
        is_joined: whether the actor has connected to this process.
    """

    actor: Any
    info: ActorInfo
    work: Any = None
    is_joined: bool = False


class RayWorkerGroup(WorkerGroup[_RayMember]):
    """The ranks of one attempt on a Ray cluster.

    Args:
        attempt: the job, and the ways to the run.
        plan: what the actors are asked for.
    """

    kill_seconds: ClassVar[float] = 5.0

    def __init__(self, attempt: Attempt, plan: Plan) -> None:
        super().__init__(attempt)
        self._attempt = attempt
        self._plan = plan
        self._inbox = Inbox()
        descriptors.keep_from_forks(self._inbox)
        self._placement_group: Any = None
        self._actors: list[Any] = []
        self._machine = name_machine()
        self._next_ask = 0.0
        self._first_may_leave = False

    # -- starting

    def start(self) -> None:
        """Place an actor for each rank, let each start its process, and begin when all are there.

        Raises:
            LaunchError: the resources did not come in time, an actor could not start, or did not reach this process.
            StopAsked: the run was stopped meanwhile.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plan, count = self._plan, self._job.local_world_size
        rest = dict(plan.resources)
        options = {"num_cpus": rest.pop("CPU", 0), "num_gpus": rest.pop("GPU", 0), "resources": rest}
        if plan.runtime_env is not None:
            options["runtime_env"] = dict(plan.runtime_env)
        self._placement_group = ray.util.placement_group(
            [dict(plan.resources) for _ in range(count)], strategy=plan.placement
        )
        kind = ray.remote(RankActor)
        for bundle in range(count):
            strategy = PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=bundle
            )
            self._actors.append(kind.options(scheduling_strategy=strategy, **options).remote(plan.start))
        self._members = _assign_ranks(self._actors, self._wait_for_actors())
        now = time.time()
        self._delivery.deliver(
            [
                Phase(rank=member.rank, time=now, name="starting", node=member.info.address)
                for member in self._members
            ]
        )
        self._connect()
        for member in self._members:
            self.tell(BeginOrder(rank=member.rank, time=now))

    def _wait_for_actors(self) -> list[ActorInfo]:
        """Wait until all actors are there; return where each is."""
        import ray

        references = [actor.describe.remote() for actor in self._actors]
        begun = time.monotonic()
        placed_at: float | None = None
        is_told = False
        rest = references
        while rest:
            ready, rest = ray.wait(references, num_returns=len(references), timeout=2 * _LOOK_SECONDS)
            self._check_answers(ready)
            now = time.monotonic()
            if placed_at is None and (ready or self._placement_group.wait(0)):
                placed_at = now
            if placed_at is None and now - begun > self._plan.timeout:
                raise LaunchError(
                    f"{self._describe_request()} did not become free in {self._plan.timeout:g} s"
                )
            if placed_at is None and now - begun > _TELL_SECONDS and not is_told:
                is_told = True
                self._say(f"Waiting for {self._describe_request()}, {self._plan.timeout:g} s at most.")
            if placed_at is not None and now - placed_at > _START_SECONDS:
                raise LaunchError(
                    f"{len(rest)} of {len(references)} Ray actors have not started in {_START_SECONDS:g} s: "
                    "Ray's logs on their nodes say why"
                )
        infos: list[ActorInfo] = [self._get_answer(reference) for reference in references]
        for info in infos:
            if info.version != find_version():
                raise LaunchError(
                    f"node {info.address} has notebook_accel {info.version}, and this process {find_version()}: "
                    "install the same version on all nodes"
                )
        return infos

    def _check_answers(self, ready: Sequence[Any]) -> None:
        """Raise LaunchError where an actor could not start, StopAsked where the run is to stop."""
        for reference in ready:
            self._get_answer(reference)
        self._attempt.control.check()
        self._delivery.deliver([])

    def _get_answer(self, reference: Any) -> Any:
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

    def _describe_request(self) -> str:
        count, resources = self._job.local_world_size, cluster.format_resources(self._plan.resources)
        return f"{count} x ({resources}) on Ray ({self._plan.placement}; free now: {cluster.describe_free()})"

    def _connect(self) -> None:
        """Let each actor start its process and connect to this one."""
        import ray

        host, port = self._plan.endpoint or (cluster.find_own_address(), 0)
        try:
            listening = (addresses.listen_for_nodes if self._plan.endpoint else addresses.listen)(host, port)
        except OSError as error:
            raise LaunchError(
                f"this process cannot listen at {host}:{port} ({error.strerror or error})"
            ) from None
        listener = Listener(listening, len(self._members))
        try:
            endpoint = (host, listener.port)
            for member in self._members:
                member.work = member.actor.work.remote(
                    self._make_assignment(member, endpoint, listener.token), self._plan.payload
                )
            deadline = time.monotonic() + _CONNECT_SECONDS
            while listener.missing:
                for rank, connection in listener.admit():
                    self._inbox.add(rank, {"events": connection})
                    self._members[rank].is_joined = True
                missing = [member for member in self._members if member.rank in listener.missing]
                works = [member.work for member in missing]
                failed = ray.wait(works, timeout=0)[0] if works else []
                if failed or time.monotonic() > deadline:
                    late = next((m for m in missing if m.work in failed), missing[0])
                    why = (
                        self._get_answer(late.work) if failed else f"no connection in {_CONNECT_SECONDS:g} s"
                    )
                    raise LaunchError(_describe_unreachable(late, endpoint, why))
                self.poll(0.005)
                self._attempt.control.check()
        finally:
            listener.close()

    def _make_assignment(self, member: _RayMember, endpoint: tuple[str, int], token: bytes) -> Assignment:
        first = self._members[0].info
        nodes = list(dict.fromkeys(other.info.node for other in self._members))
        local = [other.rank for other in self._members if other.info.node == member.info.node]
        place = Topology(
            rank=member.rank,
            local_rank=member.rank - local[0],
            world_size=len(self._members),
            local_world_size=len(local),
            node_rank=nodes.index(member.info.node),
            num_nodes=len(nodes),
        )
        work = Work(
            rank=member.rank,
            variables=list_rank_variables(
                place, self._job, address=first.address, port=first.port, attempt=self._attempt.number
            ),
            is_alone=len(nodes) == 1,
            address=member.info.address,
            sends_value=self._job.returns == "all" or (self._job.returns == "first" and member.rank == 0),
            notes=self._plan.notes,
        )
        return Assignment(endpoint=endpoint, token=token, work=work)

    # -- while they run

    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank, or to its actor; never waits."""
        self._inbox.tell(order)

    def receive(self, timeout: float) -> Sequence[Event]:
        """Wait for events of all actors, `timeout` seconds at most; return what came."""
        return [self._note_pid(event) for event in self._inbox.poll(timeout)]

    def _note_pid(self, event: Event) -> Event:
        """Note a process id; of other machines it is kept from the view, which looks for processes here.

        So are moments by their clocks, which began when the machines did.
        """
        if isinstance(event, CallEnd) and isinstance(event.outcome, Failure):
            outcome = self._note_pid(event.outcome)
            assert isinstance(outcome, Failure)
            return replace(event, outcome=outcome)
        if isinstance(event, Failure):
            event = replace(event, node=self.find_node(event.rank))
        if isinstance(event, (Failure, Pulse)) and self._members[event.rank].info.machine != self._machine:
            return replace(event, moment=None)
        if isinstance(event, Phase) and event.pid is not None:
            member = self._members[event.rank]
            member.pid = event.pid
            return event if member.info.machine == self._machine else replace(event, pid=None)
        return event

    def find_node(self, rank: int) -> str:
        """Return the address of a rank's node; none is needed where all ranks are on this machine."""
        if all(member.info.machine == self._machine for member in self._members):
            return ""
        return self._members[rank].info.address

    def note_ends(self) -> None:
        """Note which ranks are lost: their connection ended before it said how the process did."""
        for member in self.list_running():
            if member.is_joined and not self._inbox.is_open(member.rank):
                self.lose(member, self._explain_loss)

    def on_look(self) -> None:
        """Ask Ray for lost actors, and let rank 0 leave once it is the last: its process holds the store."""
        self._ask_ray()
        if not self._first_may_leave and all(member.rank == 0 for member in self.list_running()):
            self._first_may_leave = True
            self.tell(LeaveOrder(rank=0, time=time.time()))

    def close(self) -> None:
        """Give back what Ray has placed; what still runs is killed with its actor."""
        import ray

        descriptors.forget(self._inbox)
        self._inbox.close()
        with contextlib.suppress(ConnectionError):  # Ray is gone, and all that it had placed
            if cluster.is_up():
                works = [member.work for member in self._members if member.has_ended and member.work]
                if works:
                    ray.wait(works, num_returns=len(works), timeout=_LEFT_SECONDS)
                for actor in self._actors:
                    ray.kill(actor)
                if self._placement_group is not None:
                    ray.util.remove_placement_group(self._placement_group)
        self._actors.clear()
        self._members.clear()
        self._placement_group = None

    def _explain_loss(self, member: _RayMember) -> str:
        """Return what became of a lost rank, for the failure."""
        try:
            return self._ask_for_loss(member)
        except (ConnectionError, LaunchError) as error:
            return f"Ray does not answer any more ({cluster.find_telling_line(str(error))})"

    def _ask_for_loss(self, member: _RayMember) -> str:
        """Return what Ray knows of a lost actor; it may have to miss a node for a while first."""
        import ray

        where = f"on node {member.info.address}"
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        answer = member.work
        while cluster.is_up() and time.monotonic() < deadline:
            if member.info.node not in {node.name for node in cluster.list_nodes()}:
                return f"its node {member.info.address} died, or the cluster took it away"
            if ray.wait([answer], timeout=_ASK_SECONDS)[0]:
                try:
                    ray.get(answer)
                    break
                except (
                    ray.exceptions.ActorUnavailableError
                ):  # Ray does not know yet: its node may be dead too
                    time.sleep(_LOOK_SECONDS)
                    answer = member.actor.__ray_ready__.remote()
                except ray.exceptions.RayError as error:
                    if member.info.node in {node.name for node in cluster.list_nodes()}:
                        return (
                            f"its actor {where} was ended, by Ray or from outside ({_find_cause(str(error))})"
                        )
            self._delivery.deliver([])
        why = "Ray does not say why" if cluster.is_up() else "the one of this process to Ray as well"
        return f"the connection to its actor {where} ended, and {why}"

    def _ask_ray(self) -> None:
        """Look now and then whether Ray has lost an actor whose connection says nothing: its node may be gone."""
        import ray

        now = time.monotonic()
        if now < self._next_ask:
            return
        self._next_ask = now + _ASK_SECONDS
        running = {member.work: member for member in self.list_running()}
        if not running or not cluster.is_up():
            return
        with contextlib.suppress(ConnectionError):  # Ray is gone: the ranks' own connections tell the rest
            for work in ray.wait(list(running), num_returns=len(running), timeout=0)[0]:
                if not running[work].has_ended:
                    self.lose(running[work], self._explain_loss)

    def _say(self, text: str) -> None:
        self._delivery.deliver([Phase(rank=-1, time=time.time(), name="starting", detail=text)])


def _assign_ranks(actors: Sequence[Any], infos: Sequence[ActorInfo]) -> list[_RayMember]:
    """Return the members by rank: those of a node follow each other."""
    nodes = list(dict.fromkeys(info.node for info in infos))
    order = sorted(range(len(infos)), key=lambda number: nodes.index(infos[number].node))
    return [
        _RayMember(rank=rank, actor=actors[number], info=infos[number]) for rank, number in enumerate(order)
    ]


def _describe_unreachable(member: _RayMember, endpoint: tuple[str, int], why: str) -> str:
    host, port = endpoint
    return (
        f"rank {member.rank} on node {member.info.address} cannot reach this process at {host}:{port} ({why}): "
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
