"""The ranks of one attempt on several hosts: an agent for each host, joined to the notebook by its client."""

from __future__ import annotations

import pickle
import selectors
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeVar

from .... import interrupts
from ....errors import LaunchError
from ....events import (
    BeginOrder,
    CallEnd,
    Event,
    Failure,
    LeaveOrder,
    Lines,
    Metric,
    Notice,
    Order,
    Phase,
    Pulse,
    RaisedError,
)
from ....topology import Topology
from ...leftovers import LONGEST_SECONDS
from ...supervise.worker_group import Attempt, Member, WorkerGroup
from ...transfer.pickled import Pickled
from ...worker.environment import list_rank_variables
from ..attempts import Wait
from .client import WARM_SECONDS
from .keep_alive import NOTEBOOK_SILENCE_SECONDS, SILENCE_SECONDS
from .link import Link
from .messages import (
    Assigned,
    AssignOrder,
    Cleared,
    ClearOrder,
    Devices,
    Located,
    LocateOrder,
    Place,
    Prepared,
    PrepareOrder,
    Reached,
    ReachOrder,
)
from .pool import get_pool
from .rank_process import ProcessStart, Work, name_machine
from .routes import choose_addresses, list_needed, list_peers

_LOOK_SECONDS: Final = 0.05
_QUIET_SECONDS: Final = 0.25  # between two looks at connections from which nothing comes
_CLEAR_SECONDS: Final = LONGEST_SECONDS + 1.0
_MISSING: Final = ("FileNotFoundError", "ModuleNotFoundError")
_CPU: Final = "ACCELERATE_USE_CPU"
_NETWORKS: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

AnswerT = TypeVar("AnswerT", Located, Prepared, Reached, Assigned, Cleared)


QUEUED: Final = "\n"
"""At the end of what is waited for: the hosts are not there yet, and the run is in a queue."""


class Lender(ABC):
    """Has the hosts of one run, for all its attempts.

    Attributes:
        warm_seconds: how long agents stay for the next launch.
        busy_until: until when agents of lost connections, and their ranks, may live, by the monotonic clock.
    """

    warm_seconds: float = WARM_SECONDS
    busy_until: float = 0.0

    @abstractmethod
    def open(self, wait: Wait) -> list[Link]:
        """Return a connection to each host, in the order of their ranks. Whoever takes them gives them to `take_back`.

        It is called in a block of `delay_interrupt`.

        Args:
            wait: called several times a second while it waits.

        Raises:
            LaunchError: a host cannot be used. It has a line for each problem.
        """

    @abstractmethod
    def find_obstacle(self, wait: Wait) -> str:
        """Return why ranks cannot start again, empty where they can; `wait` is as for `open`."""

    def take_back(self, link: Link, *, is_clean: bool) -> None:
        """Take a connection of `open` back: an attempt has ended.

        Args:
            link: the connection.
            is_clean: see `Pool.put`.
        """
        if link.is_silent:
            self.busy_until = time.monotonic() + NOTEBOOK_SILENCE_SECONDS - SILENCE_SECONDS
        get_pool().put(link, is_clean=is_clean)

    @abstractmethod
    def give_back(self, *, is_stopped: bool) -> None:
        """Let go of the hosts: the run has ended.

        Args:
            is_stopped: whether somebody ended it.
        """


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the agents are asked for, alike in each attempt.

    Attributes:
        lender: has the hosts.
        counts: number of ranks of each host, in the order of their ranks.
        pickled: the function with its arguments; empty where the agents have them.
        notes: a pickled `Notes`, for each process.
        start: how each process starts.
        ends_with_group: whether the lender gets the hosts back when the group closes: there is no other attempt.
    """

    lender: Lender
    counts: Sequence[int]
    pickled: Pickled
    notes: bytes
    start: ProcessStart
    ends_with_group: bool = False


@dataclass(kw_only=True)
class HostMember(Member):
    """A rank with the connection to its host."""

    link: Link


class HostsWorkerGroup(WorkerGroup[HostMember]):
    """The ranks of one attempt on several hosts.

    Args:
        attempt: the job, and the ways to the run.
        plan: what the agents are asked for.
    """

    kill_seconds: ClassVar[float] = 5.0

    def __init__(self, attempt: Attempt, plan: Plan) -> None:
        super().__init__(attempt)
        self._attempt = attempt
        self._plan = plan
        self._links: list[Link] = []
        self._ranks: dict[Link, range] = {}
        self._link_of: dict[int, Link] = {}  # by rank
        self._places: dict[int, Topology] = {}  # by rank
        self._looked = 0.0  # at connections from which nothing came, by the monotonic clock
        self._answers: dict[tuple[Link, type[Event]], Event] = {}
        self._selector = selectors.DefaultSelector()
        self._selecting = threading.Lock()
        self._machine = name_machine()
        self._has_begun = False
        self._first_may_leave = False
        self._where: list[str] = []
        self._waiting_for = ""
        self._start = plan.start
        self.port = 0

    # -- starting

    def start(self) -> None:
        """Start a process for each rank, and begin when all are there.

        Raises:
            LaunchError: a host cannot be used, or its processes cannot start.
            StopAsked: the run was stopped meanwhile.
        """
        with interrupts.delay_interrupt():
            self._links = self._plan.lender.open(self._check)
        first = 0
        for link, count in zip(self._links, self._plan.counts, strict=True):
            self._ranks[link] = range(first, first + count)
            self._link_of.update(dict.fromkeys(self._ranks[link], link))
            first += count
            self._selector.register(link, selectors.EVENT_READ, link)
        self._places = self._place_ranks()
        if not self._has_devices():
            self._start = replace(self._start, variables={_CPU: "true", **self._start.variables})
        self._where = where = self._find_addresses()
        now = time.time()
        self.port = self._meet(where)
        self._members = [
            HostMember(rank=rank, link=link) for link in self._links for rank in self._ranks[link]
        ]
        self._delivery.deliver(
            [
                Phase(rank=member.rank, time=now, name="starting", node=member.link.host)
                for member in self._members
            ]
        )
        for node, link in enumerate(self._links):
            self._send(link, self._make_assignment(node, where))
        for assigned in self._wait_for(Assigned, self._links):
            for rank, pid in assigned.pids.items():
                self._member(rank).pid = pid
        self._has_begun = True
        for link in self._links:
            self._send(link, BeginOrder(rank=-1, time=now))

    def _find_addresses(self) -> list[str]:
        """Return the address of each host; one that is reached by a loopback address is asked for another."""
        facts = [link.facts for link in self._links]
        where = choose_addresses(facts)
        asked = [node for node, address in enumerate(where) if not address]
        for node in asked:
            peers = list_peers(facts, node)
            self._send(self._links[node], LocateOrder(rank=-1, time=time.time(), peers=peers))
        answers = self._wait_for(Located, [self._links[node] for node in asked])
        for node, answer in zip(asked, answers, strict=True):
            where[node] = answer.address
        return where

    def _has_devices(self) -> bool:
        return any(link.devices is not None and link.devices.count for link in self._links)

    def _meet(self, where: Sequence[str]) -> int:
        """Let all hosts see whether they reach each other; return the port of the store, on the first one."""
        for node, link in enumerate(self._links):
            port = 0 if node else self._job.rendezvous.port
            self._send(link, PrepareOrder(rank=-1, time=time.time(), address=where[node], port=port))
        ports = [answer.port for answer in self._wait_for(Prepared, self._links)]
        if len(self._links) > 1:
            has_other_network = self._has_devices() or any(map(self._start.variables.get, _NETWORKS))
            nodes = {link.node: number for number, link in reversed([*enumerate(self._links)])}
            numbers = sorted(nodes.values())  # one connection to each node
            places = [
                Place(host=self._links[number].host, address=where[number], port=ports[number])
                for number in numbers
            ]
            first = [self._links[number] for number in numbers]
            for node, link in enumerate(first):
                asked = [
                    places[other] for other in list_needed(node, len(places), store_only=has_other_network)
                ]
                self._send(link, ReachOrder(rank=-1, time=time.time(), places=asked))
            self._wait_for(Reached, first)
        return ports[0]

    def _check(self, waiting_for: str = "") -> None:
        self._attempt.control.check()
        interrupts.obey_interrupt()
        news: list[Event] = []
        if waiting_for != self._waiting_for:
            now, is_queued = time.time(), waiting_for.endswith(QUEUED)
            self._waiting_for = waiting_for
            news = [Phase(rank=-1, time=now, name="queued" if is_queued else "starting")]
            news += [Notice(rank=-1, time=now, text=waiting_for.removesuffix(QUEUED))] if waiting_for else []
        self._delivery.deliver(news)

    def _wait_for(self, kind: type[AnswerT], links: Sequence[Link]) -> list[AnswerT]:
        """Return the answer of each host; LaunchError where one has none."""
        while True:
            answers = [self._answers.get((link, kind)) for link in links]
            for link, answer in zip(links, answers, strict=True):
                problem = getattr(answer, "problem", "")
                if answer is None and link.lost:
                    problem = self.describe_loss(link)
                if problem:
                    said = "\n".join(link.said[-20:])
                    raise LaunchError(
                        f"{link.client.host_noun} {link.host}: {problem}"
                        + (f"; it wrote:\n{said}" if said else "")
                    )
            found = [answer for answer in answers if isinstance(answer, kind)]
            if len(found) == len(links):
                return found
            self.poll(_LOOK_SECONDS)
            self._check()

    def _make_assignment(self, node: int, where: Sequence[str]) -> AssignOrder:
        link, pickled = self._links[node], self._plan.pickled
        return AssignOrder(
            rank=-1,
            time=time.time(),
            start=self._start,
            works=[self._make_work(rank, where[node], where[0]) for rank in self._ranks[link]],
            data=pickle.PickleBuffer(pickled.data),
            warm_seconds=self._plan.lender.warm_seconds,
            buffers=pickled.buffers,
        )

    def _place_ranks(self) -> dict[int, Topology]:
        """Return the place of each rank; several connections may lead to one node."""
        nodes: dict[str, list[int]] = {}
        for link, ranks in self._ranks.items():
            nodes.setdefault(link.node, []).extend(ranks)
        return {
            rank: Topology(
                rank=rank,
                local_rank=local_rank,
                world_size=len(self._link_of),
                local_world_size=len(ranks),
                node_rank=node_rank,
                num_nodes=len(nodes),
            )
            for node_rank, ranks in enumerate(nodes.values())
            for local_rank, rank in enumerate(ranks)
        }

    def _make_work(self, rank: int, address: str, first: str) -> Work:
        place = self._places[rank]
        return Work(
            rank=rank,
            variables=list_rank_variables(
                place, self._job, address=first, port=self.port, attempt=self._attempt.number
            ),
            is_alone=place.num_nodes == 1,
            address=address,
            sends_value=self._job.returns == "all" or (self._job.returns == "first" and rank == 0),
            notes=self._plan.notes,
        )

    # -- while they run

    def _send(self, link: Link, event: Event) -> None:
        link.send(event)
        self._watch(link)

    def _watch(self, link: Link) -> None:
        """Wait for room in a connection too, where something waits to be sent."""
        if link.has_outgoing:
            with self._selecting:
                if link.stdin_fileno not in self._selector.get_map():
                    self._selector.register(link.stdin_fileno, selectors.EVENT_WRITE, link)

    def tell(self, order: Order) -> None:
        """Send an order to the worker of its rank, or to the agent that holds it; never waits."""
        link = self._link_of.get(order.rank)
        if link is not None and not link.lost:
            self._send(link, order)

    def receive(self, timeout: float) -> Sequence[Event]:
        """Wait for events of all hosts, `timeout` seconds at most; return what came."""
        if not self._selector.get_map():
            time.sleep(min(timeout, _LOOK_SECONDS))
            return []
        heard: dict[Link, None] = {}
        for key, mask in self._selector.select(timeout):
            link: Link = key.data
            if mask & selectors.EVENT_READ:
                heard[link] = None
            if mask & selectors.EVENT_WRITE:
                link.flush()
                with self._selecting:
                    if not link.has_outgoing:
                        self._selector.unregister(key.fileobj)
        now = time.monotonic()
        if now - self._looked >= _QUIET_SECONDS:  # each look costs as much as all hosts
            self._looked = now
            heard = dict.fromkeys(self._links)
        return [event for link in heard for event in self._receive_from(link)]

    def _receive_from(self, link: Link) -> list[Event]:
        if link.lost:
            return []
        events: list[Event] = []
        ranks = self._ranks.get(link, ())
        for event in link.receive():
            if event.rank in ranks:
                events.append(event if isinstance(event, (Lines, Metric)) else self._adapt(event, link))
            elif isinstance(event, (Located, Prepared, Reached, Assigned, Cleared)):
                self._answers[link, type(event)] = event
            elif not isinstance(event, Devices):
                link.lost = f"what it sends cannot be right (an event of rank {event.rank})"
        if link.lost:
            self._forget(link)
        return events

    def _forget(self, link: Link) -> None:
        with self._selecting:
            for fileobj in (link, link.stdin_fileno):
                if fileobj in self._selector.get_map():
                    self._selector.unregister(fileobj)

    def _adapt(self, event: Event, link: Link) -> Event:
        """Keep process ids and clocks of other machines from the view, and name the host of what is missing there."""
        is_here = link.facts.get("machine") == self._machine
        if isinstance(event, CallEnd) and isinstance(event.outcome, Failure):
            outcome = self._adapt(event.outcome, link)
            assert isinstance(outcome, Failure)
            return replace(event, outcome=outcome)
        if isinstance(event, Failure):
            moment = event.moment if is_here else None
            return replace(
                event,
                moment=moment,
                node=self.find_node(event.rank),
                error=_add_host(event.error, event.rank, f"{link.client.host_noun} {link.host}"),
            )
        if isinstance(event, Pulse) and not is_here:
            return replace(event, moment=None)
        if isinstance(event, Phase) and event.pid is not None and not is_here:
            return replace(event, pid=None)
        return event

    def find_node(self, rank: int) -> str:
        """Return the host of a rank; none is needed where the only one is this machine."""
        host = self._link_of.get(rank)
        is_alone = rank in self._places and self._places[rank].num_nodes == 1
        if host is None or (is_alone and host.facts.get("machine") == self._machine):
            return ""
        return host.host

    def note_ends(self) -> None:
        """Note which ranks are lost: the connection to their host has ended before it said how they did."""
        if not self._has_begun:
            return  # `start` looks itself
        for member in self.list_running():
            if member.link.lost:
                self.note_loss(member, self.explain_loss)

    def judge_end(self, member: Member, exitcode: int | None, at: float) -> Event:
        """Return what it means that a worker's process ended without a word.

        Args:
            member: the worker.
            exitcode: of its process, negative for a signal, None where nobody knows it.
            at: when it ended, by the clock of its host: that is what counts, for the news of it may come late.
        """
        found = super().judge_end(member, exitcode, at)
        return replace(found, moment=None) if isinstance(found, Failure) else found

    def note_loss(self, member: HostMember, explain: Callable[[HostMember], str]) -> None:
        """Note that a rank is lost with its host, and end the others; of a session, the call that runs ends them.

        Args:
            member: the rank.
            explain: finds out what became of it, once the others have ended.
        """
        if self._job.serve is None:
            self.lose(member, explain)
            return
        now, moment = time.time(), time.monotonic()  # finding out what became of it may take a minute
        member.has_ended = True
        node, text = self.find_node(member.rank), explain(member)
        lost = Failure(rank=member.rank, time=now, pid=member.pid, lost=text, moment=moment, node=node)
        self._delivery.report(lost)

    def explain_loss(self, member: HostMember) -> str:
        """Return what became of a rank whose connection has ended.

        Args:
            member: the rank.
        """
        return f"{member.link.client.host_noun} {member.link.host}: {self.describe_loss(member.link)}"

    def describe_loss(self, link: Link) -> str:
        """Return why a connection has ended, as a clause.

        Args:
            link: the connection.
        """
        return link.lost

    def on_look(self) -> None:
        """Let rank 0 leave once it is the last: its process holds the store."""
        if not self._first_may_leave and all(member.rank == 0 for member in self.list_running()):
            self._first_may_leave = True
            self.tell(LeaveOrder(rank=0, time=time.time()))

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses of the hosts, by which ranks reach each other."""
        return list(dict.fromkeys(self._where))

    # -- ending

    def stop(self, grace: float, signum: int = signal.SIGINT) -> None:
        """End every worker; where none has begun yet, `close` ends the agents with all that they have."""
        if self._has_begun:
            super().stop(grace, signum)
            return
        self._delivery.begin_to_stop()
        for member in self.list_running():
            self.stopped_ranks.add(member.rank)
            member.has_ended = True

    def close(self) -> None:
        """Let the agents end what is left, and keep the connections for the next launch."""
        living = [link for link in self._links if self._has_begun and not link.lost]
        for link in living:
            self._send(link, ClearOrder(rank=-1, time=time.time()))
        deadline = time.monotonic() + _CLEAR_SECONDS
        while time.monotonic() < deadline and any(
            not link.lost and (link, Cleared) not in self._answers for link in living
        ):
            self.receive(_LOOK_SECONDS)
        for link in self._links:
            self._plan.lender.take_back(
                link, is_clean=(link, Cleared) in self._answers and not link.has_outgoing
            )
        self._selector.close()
        self._links = []
        self._ranks, self._link_of, self._places = {}, {}, {}
        self._members.clear()
        if self._plan.ends_with_group:
            self._plan.lender.give_back(is_stopped=False)


def _add_host(error: RaisedError | None, rank: int, host: str) -> RaisedError | None:
    """Return an error with a note that names the host, where something is missing there."""
    if error is None:
        return None
    if error.type_name in _MISSING or "No such file or directory" in error.message:
        what = "module" if error.type_name == "ModuleNotFoundError" else "file"
        note = (
            f"rank {rank} is on {host}, and the {what} is not there: a launch carries the function, its arguments "
            "and the globals that it uses, and no files"
        )
        return replace(error, notes=(*error.notes, note))
    return error
