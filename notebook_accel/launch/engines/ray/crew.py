"""The actors of one attempt on a Ray cluster, and their ranks' processes: placed, joined by TCP, watched, stopped."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from ....errors import LaunchError
from ....events import BeginOrder, Ended, Event, Failure, LeaveOrder, Phase, SignalOrder
from ....stream.door import Door
from ....stream.inbox import Inbox
from ....stream.record import RunRecord
from ... import addresses, signals
from ...agreement import Agreement
from ...control import Control
from ...delivery import Delivery
from ...hanging import HangWatch
from ...job import Job
from ..base import Deliver
from . import cluster
from .actor import Assignment, Outset, Place, RankActor, machine, version

State = Literal["done", "failed", "stopped", "hung"]

_LOOK_SECONDS: Final = 0.1
_TELL_SECONDS: Final = 3.0  # without the resources, until the cell says what the launch waits for
_START_SECONDS: Final = (
    300.0  # for an actor's process, once it has its resources: its environment may be made first
)
_CONNECT_SECONDS: Final = 30.0
_LAST_WORDS: Final = 0.1
_KILL_SECONDS: Final = 5.0
_VERDICT_SECONDS: Final = 40.0  # Ray takes about half of that to declare a silent node dead
_ASK_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the actors are asked for, alike in each attempt.

    Attributes:
        resources: of each worker, by Ray's names.
        placement: `PACK` and so on.
        runtime_env: Ray's, of the actors.
        timeout: seconds to wait for resources that others use, or that are to come.
        endpoint: host, and port or 0, at which the nodes reach this process; None finds it out.
        parts: the reference of the job's parcel in Ray's store.
        notes: pickled, for each process.
        outset: of each process.
    """

    resources: Mapping[str, float]
    placement: str
    runtime_env: Mapping[str, Any] | None
    timeout: float
    endpoint: tuple[str, int] | None
    parts: Any
    notes: bytes
    outset: Outset


@dataclass(kw_only=True)
class _Member:
    rank: int
    actor: Any
    place: Place
    work: Any = None
    pid: int = 0
    is_joined: bool = False
    ended: bool = False


class RayCrew:
    """The ranks of one attempt.

    Args:
        job: what to run.
        plan: what it runs on.
        record: says which ranks sent a result or failure.
        deliver: takes the events as they come; it is called several times a second also where there are none.
        control: says when the run is to stop.
        attempt: how often it was started again.
    """

    def __init__(
        self, job: Job, plan: Plan, record: RunRecord, deliver: Deliver, control: Control, attempt: int
    ) -> None:
        self._job = job
        self._plan = plan
        self._record = record
        self._deliver = Delivery(deliver, record)
        self._control = control
        self._attempt = attempt
        self._inbox = Inbox()
        self._agreement = Agreement(self._inbox, record, control)
        self._group: Any = None
        self._actors: list[Any] = []
        self._members: list[_Member] = []
        self._machine = machine()
        self._next_ask = 0.0
        self._hang_watch = HangWatch(job.hang_timeout, self._inbox.tell, deliver, self._send)
        self.hang = ""
        self._all_but_first_left = False
        self.stopped_ranks: set[int] = set()

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
        self._group = ray.util.placement_group(
            [dict(plan.resources) for _ in range(count)], strategy=plan.placement
        )
        kind = ray.remote(RankActor)
        for bundle in range(count):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
            self._actors.append(kind.options(scheduling_strategy=strategy, **options).remote(plan.outset))
        self._members = _ranked(self._actors, self._places())
        now = time.time()
        self._deliver([Phase(rank=member.rank, time=now, name="starting") for member in self._members])
        self._connect()
        for member in self._members:
            self._inbox.tell(BeginOrder(rank=member.rank, time=now))

    def _places(self) -> list[Place]:
        """Wait until all actors are there; return where each is."""
        import ray

        references = [actor.where.remote() for actor in self._actors]
        begun = time.monotonic()
        placed_at: float | None = None
        told = False
        rest = references
        while rest:
            ready, rest = ray.wait(references, num_returns=len(references), timeout=2 * _LOOK_SECONDS)
            self._look_up(ready)
            now = time.monotonic()
            if placed_at is None and (ready or self._group.wait(0)):
                placed_at = now
            if placed_at is None and now - begun > self._plan.timeout:
                raise LaunchError(f"{self._waited_for()} did not become free in {self._plan.timeout:g} s")
            if placed_at is None and now - begun > _TELL_SECONDS and not told:
                told = True
                self._say("starting", f"Waiting for {self._waited_for()}, {self._plan.timeout:g} s at most.")
            if placed_at is not None and now - placed_at > _START_SECONDS:
                raise LaunchError(
                    f"{len(rest)} of {len(references)} Ray actors have not started in {_START_SECONDS:g} s: "
                    "Ray's logs on their nodes say why"
                )
        places: list[Place] = [self._answer(reference) for reference in references]
        for place in places:
            if place.version != version():
                raise LaunchError(
                    f"node {place.address} has notebook_accel {place.version}, and this process {version()}: "
                    "install the same version on all nodes"
                )
        return places

    def _look_up(self, ready: Sequence[Any]) -> None:
        """Raise what hinders an actor that has answered; let the notebook go on otherwise."""
        for reference in ready:
            self._answer(reference)
        self._control.check()
        self._deliver([])

    def _answer(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            text = str(error).strip()
            if "notebook_accel" in text and ("ModuleNotFoundError" in text or "No module named" in text):
                raise LaunchError(
                    f"a node of the cluster does not have this notebook_accel ({_last_line(text)}): install the same "
                    "version on all nodes, or call ray.init(runtime_env={'py_modules': [notebook_accel]}) before"
                ) from None
            raise LaunchError(f"a Ray actor could not start: {_last_line(text)}") from None

    def _waited_for(self) -> str:
        count, resources = self._job.local_world_size, cluster.spoken(self._plan.resources)
        return f"{count} x ({resources}) on Ray ({self._plan.placement}; free now: {cluster.available()})"

    def _connect(self) -> None:
        """Let each actor start its process and connect to this one."""
        import ray

        host, port = self._plan.endpoint or (cluster.own_address(), 0)
        try:
            listening = addresses.listen("" if self._plan.endpoint else host, port)
        except OSError as error:
            raise LaunchError(
                f"this process cannot listen at {host}:{port} ({error.strerror or error})"
            ) from None
        door = Door(listening, len(self._members))
        try:
            endpoint = (host, door.port)
            for member in self._members:
                member.work = member.actor.work.remote(
                    self._assignment(member, endpoint, door.token), self._plan.parts
                )
            deadline = time.monotonic() + _CONNECT_SECONDS
            while door.missing:
                for rank, connection in door.admit():
                    self._inbox.add(rank, {"events": connection})
                    self._members[rank].is_joined = True
                missing = [member for member in self._members if member.rank in door.missing]
                works = [member.work for member in missing]
                failed = ray.wait(works, timeout=0)[0] if works else []
                if failed or time.monotonic() > deadline:
                    late = next((m for m in missing if m.work in failed), missing[0])
                    why = self._answer(late.work) if failed else f"no connection in {_CONNECT_SECONDS:g} s"
                    raise LaunchError(_unreachable(late, endpoint, why))
                self._poll(0.005)
                self._control.check()
        finally:
            door.close()

    def _assignment(self, member: _Member, endpoint: tuple[str, int], token: bytes) -> Assignment:
        job, rank = self._job, member.rank
        first = self._members[0].place
        nodes = list(dict.fromkeys(other.place.node for other in self._members))
        local = [other.rank for other in self._members if other.place.node == member.place.node]
        values = {
            "RANK": rank,
            "LOCAL_RANK": rank - local[0],
            "WORLD_SIZE": len(self._members),
            "LOCAL_WORLD_SIZE": len(local),
            "GROUP_RANK": nodes.index(member.place.node),
            "GROUP_WORLD_SIZE": len(nodes),
            "MASTER_ADDR": first.address,
            "MASTER_PORT": first.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": self._attempt,
            "TORCHELASTIC_MAX_RESTARTS": job.max_restarts,
            "TORCHELASTIC_RUN_ID": job.rendezvous.run_id,
            "FORK_LAUNCHED": 1,
        }
        return Assignment(
            rank=rank,
            endpoint=endpoint,
            token=token,
            variables={name: str(value) for name, value in values.items()},
            alone=len(nodes) == 1,
            sends_value=job.returns == "all" or (job.returns == "first" and rank == 0),
            notes=self._plan.notes,
        )

    # -- watching

    def watch(self) -> State:
        """Deliver what comes until the attempt ends; say how it did."""
        while True:
            self._poll(_LOOK_SECONDS)
            self._ask_ray()
            running = self._running()
            if self._record.failures:
                return "failed"
            if not running:
                return "done"
            if self._agreement.is_time(member.rank for member in running):
                return "stopped"
            if self._hangs():
                return "hung"
            if not self._all_but_first_left and all(member.rank == 0 for member in running):
                self._all_but_first_left = True  # its process holds the store, and waits for this
                self._inbox.tell(LeaveOrder(rank=0, time=time.time()))

    def _hangs(self) -> bool:
        """Tell where nothing goes on any more; whether the run is to end for it."""
        running = {member.rank: member.pid for member in self._running()}
        started = {rank for rank, pid in running.items() if pid}  # it is told with the phase
        text = self._hang_watch.look(running, started, list(self._record.results))
        self.hang = text if self._job.on_hang == "raise" else ""
        return bool(self.hang)

    def _send(self, rank: int, signum: int) -> None:
        self._inbox.tell(SignalOrder(rank=rank, time=time.time(), signum=signum))

    def settle(self) -> None:
        """After a failure: hear the last words of ranks that end of themselves, then end the others."""
        deadline = time.monotonic() + _LAST_WORDS
        while self._running() and time.monotonic() < deadline:
            self._poll(_LAST_WORDS / 5)
        self.stop(1.0, signal.SIGTERM)

    def stop(self, grace: float, signum: int = signal.SIGINT) -> None:
        """End every rank and all that it started; `grace` seconds after `signum` by SIGKILL."""
        self._deliver.begin_to_stop()
        self.stopped_ranks.update(member.rank for member in self._running())
        for number, seconds in ((signum, grace), (signals.KILL, _KILL_SECONDS)):
            running = self._running() if seconds > 0 else []
            for member in running:
                self._inbox.tell(SignalOrder(rank=member.rank, time=time.time(), signum=number))
            deadline = time.monotonic() + seconds
            while running and self._running() and time.monotonic() < deadline:
                self._poll(0.02)

    def close(self) -> None:
        """Give back what Ray has placed; what still runs is killed with its actor."""
        import ray

        self._inbox.close()
        with contextlib.suppress(ConnectionError):  # Ray is gone, and all that it had placed
            if cluster.is_up():
                for actor in self._actors:
                    ray.kill(actor)
                if self._group is not None:
                    ray.util.remove_placement_group(self._group)
        self._actors.clear()
        self._members.clear()
        self._group = None

    def _running(self) -> list[_Member]:
        return [member for member in self._members if not member.ended]

    def _poll(self, timeout: float) -> None:
        events = self._inbox.poll(timeout)
        self._hang_watch.take(events)
        self._deliver([self._seen(event) for event in events if not isinstance(event, Ended)])
        for event in events:
            if isinstance(event, Ended):
                self._end(event)
        for member in self._running():
            if member.is_joined and not self._inbox.is_open(member.rank):
                self._lose(member)

    def _seen(self, event: Event) -> Event:
        """Note the process ids; leave those of other machines out of what the view looks at."""
        if isinstance(event, Phase) and event.pid is not None:
            member = self._members[event.rank]
            member.pid = event.pid
            return event if member.place.machine == self._machine else replace(event, pid=None)
        return event

    def _end(self, event: Ended) -> None:
        """Note that a process has ended, and where it did so without a word."""
        member = self._members[event.rank]
        member.ended = True
        if not self._deliver.has_ended(event.rank) and event.rank not in self.stopped_ranks:
            self._deliver([Failure(rank=event.rank, time=event.time, pid=event.pid, exitcode=event.exitcode)])

    def _lose(self, member: _Member) -> None:
        """Take note of a rank whose connection ended without a word of how its process did, and find out why."""
        now = time.time()
        member.ended = True
        if self._deliver.is_stopping or self._deliver.has_ended(member.rank):
            return
        self.stop(_LAST_WORDS, signal.SIGTERM)  # the others wait for it in vain
        try:
            lost = self._verdict(member)
        except (ConnectionError, LaunchError) as error:
            lost = f"Ray does not answer any more ({cluster.telling_line(str(error))})"
        self._deliver.tell(Failure(rank=member.rank, time=now, pid=member.pid, lost=lost))

    def _verdict(self, member: _Member) -> str:
        """Return what Ray knows of a lost actor; it may have to miss a node for a while first."""
        import ray

        where = f"on node {member.place.address}"
        deadline = time.monotonic() + _VERDICT_SECONDS
        answer = member.work
        while cluster.is_up() and time.monotonic() < deadline:
            if member.place.node not in {node.name for node in cluster.nodes()}:
                return f"its node {member.place.address} died, or the cluster took it away"
            if ray.wait([answer], timeout=_ASK_SECONDS)[0]:
                try:
                    ray.get(answer)
                    break
                except (
                    ray.exceptions.ActorUnavailableError
                ):  # Ray does not know yet: it may be dead, and its node too
                    time.sleep(_LOOK_SECONDS)
                    answer = member.actor.__ray_ready__.remote()
                except ray.exceptions.RayError as error:
                    if member.place.node in {node.name for node in cluster.nodes()}:
                        return f"its actor {where} was ended, by Ray or from outside ({_cause(str(error))})"
            self._deliver([])
        why = "Ray does not say why" if cluster.is_up() else "the one of this process to Ray as well"
        return f"the connection to its actor {where} ended, and {why}"

    def _ask_ray(self) -> None:
        """Look now and then whether Ray has lost an actor whose connection says nothing: its node may be gone."""
        import ray

        now = time.monotonic()
        if now < self._next_ask:
            return
        self._next_ask = now + _ASK_SECONDS
        running = {member.work: member for member in self._running()}
        if not running or not cluster.is_up():
            return
        with contextlib.suppress(ConnectionError):  # Ray is gone: the ranks' own connections tell the rest
            for work in ray.wait(list(running), num_returns=len(running), timeout=0)[0]:
                if not running[work].ended:
                    self._lose(running[work])

    def _say(self, name: Literal["starting", "restarting"], text: str) -> None:
        self._deliver([Phase(rank=-1, time=time.time(), name=name, detail=text)])


def _ranked(actors: Sequence[Any], places: Sequence[Place]) -> list[_Member]:
    """Give out the ranks: those of a node follow each other."""
    nodes = list(dict.fromkeys(place.node for place in places))
    order = sorted(range(len(places)), key=lambda number: nodes.index(places[number].node))
    return [
        _Member(rank=rank, actor=actors[number], place=places[number]) for rank, number in enumerate(order)
    ]


def _unreachable(member: _Member, endpoint: tuple[str, int], why: str) -> str:
    host, port = endpoint
    return (
        f"rank {member.rank} on node {member.place.address} cannot reach this process at {host}:{port} ({why}): "
        "output and values come by TCP; open a way from the cluster to here and name it, "
        "engine=RayEngine(notebook_address='host:port'), or run the notebook on a machine of the cluster"
    )


def _last_line(text: str) -> str:
    return text.splitlines()[-1].strip()[:300] if text else "Ray says nothing more"


def _cause(text: str) -> str:
    """Return the sentence of Ray's long account that says why an actor died."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or "exit" in line.lower() or "OOM" in line]
    return (telling or lines or ["Ray does not say why"])[-1].partition(" Some common causes")[0][:300]
