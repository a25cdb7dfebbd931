"""Engines whose ranks are on several hosts, with an agent on each: what they take from the notebook."""

from __future__ import annotations

import contextlib
import pickle
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from .... import environ, interrupts
from ....config.launch_options import StartMethod
from ....takeover import finder
from ...agent.orders import find_directory
from ...agent.parent_state import ParentState, list_path
from ...job import Job
from ...supervise.worker_group import Attempt
from ...transfer.pickled import Pickled
from ...transfer.unpicklable import pack_job
from ..attempts import GroupEngine, Wait
from .hosts_group import HostsWorkerGroup, Lender, Plan
from .link import Link
from .rank_process import Notes, ProcessStart

_LOOK_SECONDS: Final = 0.1
CPU_VARIABLE: Final = "ACCELERATE_USE_CPU"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What ranks take from the process that launches them, beside the function.

    Attributes:
        notes: what it tells all ranks.
        start: how their processes start.
    """

    notes: Notes
    start: ProcessStart

    @classmethod
    def capture(cls, job: Job) -> Origin:
        """Return what the ranks of a job take from this process.

        Args:
            job: what runs.
        """
        state = ParentState.capture(job)
        notes = Notes(
            settings=state.settings,
            sources=state.sources,
            child_start_method=state.child_start_method,
            in_background=job.background,
            serve=job.serve,
        )
        start = ProcessStart(
            variables={**({finder.VARIABLE: "true"} if finder.is_installed() else {}), **job.environment},
            directory=state.directory or find_directory(),
            path=list_path(),
            with_ipython=state.with_ipython,
        )
        return cls(notes=notes, start=start)


class HostsEngine(GroupEngine[Plan]):
    """An engine whose ranks are on hosts. A subclass says how many on each, and how they are reached."""

    on_this_node = False
    start_methods: ClassVar[tuple[StartMethod, ...]] = ()

    @abstractmethod
    def make_lender(self, job: Job) -> Lender:
        """Return what has the hosts of a run.

        Args:
            job: what runs.
        """

    @abstractmethod
    def count_ranks(self, job: Job) -> list[int]:
        """Return the number of ranks of each host.

        Args:
            job: what runs.

        Raises:
            LaunchError: a host cannot be used.
        """

    @contextlib.contextmanager
    def plan(self, job: Job) -> Iterator[Plan]:
        """Take from this process what the ranks need; ShipError where that cannot be pickled."""
        lender, is_stopped = self.make_lender(job), True
        try:
            yield self.make_plan(job, *self.take(job), lender)
            is_stopped = False
        finally:
            with interrupts.delay_interrupt():
                lender.give_back(is_stopped=is_stopped)

    def take(self, job: Job) -> tuple[Pickled, Origin]:
        """Return the function with its arguments, and what else the ranks need of the process that launches.

        Args:
            job: what runs; what cannot be pickled is a ShipError.

        Returns:
            Both; buffers of the pickle are those of the arguments, see `copy`.
        """
        pickled = Pickled(data=b"", buffers=[])
        if job.serve is None:
            pickled = pack_job(job.function, job.args, job.name)
        return pickled, Origin.capture(job)

    def make_plan(
        self, job: Job, pickled: Pickled, origin: Origin, lender: Lender, *, ends_with_group: bool = False
    ) -> Plan:
        """Return what the agents are asked for.

        Args:
            job: what runs.
            pickled: the function with its arguments; empty where the workers serve calls.
            origin: see `take`.
            lender: has the hosts.
            ends_with_group: see `Plan`.

        Raises:
            LaunchError: a host cannot be used.
        """
        return Plan(
            lender=lender,
            counts=self.count_ranks(job),
            pickled=copy(pickled),
            notes=pickle.dumps(origin.notes),
            start=origin.start,
            ends_with_group=ends_with_group,
        )

    def make_group(self, plan: Plan, attempt: Attempt) -> HostsWorkerGroup:
        """Return the ranks of an attempt."""
        return HostsWorkerGroup(attempt, plan)

    def make_session_group(self, job: Job, attempt: Attempt) -> HostsWorkerGroup:
        """Return workers that serve the calls of a session."""
        pickled, origin = self.take(job)
        plan = self.make_plan(job, pickled, origin, self.make_lender(job), ends_with_group=True)
        return self.make_group(plan, attempt)

    def find_obstacle(self, job: Job, plan: Plan, wait: Wait) -> str:
        """Return why the ranks cannot start again, empty where they can."""
        while time.monotonic() < plan.lender.busy_until:
            wait("Waiting for the end of ranks behind a connection that was lost.")
            time.sleep(_LOOK_SECONDS)
        return plan.lender.find_obstacle(wait)


def copy(pickled: Pickled) -> Pickled:
    """Return a pickle with buffers of its own: the notebook goes on, and may change what it was made of."""
    parts = (part.raw() if isinstance(part, pickle.PickleBuffer) else part for part in pickled.buffers)
    return Pickled(data=pickled.data, buffers=[*map(bytes, parts)])


def uses_cpu(environment: Mapping[str, str]) -> bool:
    """Return whether processes leave accelerators alone, by the variables of a launch or of this process."""
    said = environ.flag_in(environment, CPU_VARIABLE)
    return bool(environ.flag(CPU_VARIABLE) if said is None else said)


def check_devices(links: Sequence[Link], counts: Sequence[int]) -> list[str]:
    """Return what is wrong with the devices of hosts, a sentence each; CPUs are enough where no host has others.

    Args:
        links: a connection to each host.
        counts: number of ranks of each.
    """
    devices = [(link.devices.label, link.devices.count) for link in links if link.devices is not None]
    if not any(count for _, count in devices):
        return []
    problems = []
    for link, ranks, (label, count) in zip(links, counts, devices, strict=True):
        where = f"{link.client.host_noun} {link.host}"
        if not count:
            problems.append(
                f"{where} has no GPU, and other {link.client.host_noun}s have: leave it out, or launch on CPUs with "
                f"environment={{{CPU_VARIABLE!r}: 'true'}}"
            )
        elif ranks > count:
            problems.append(f"{where}: {ranks} ranks need {ranks} {label} devices, and it has {count}")
    if len({label for label, count in devices if count}) > 1:
        kinds = ", ".join(f"{link.host} {label}" for link, (label, _) in zip(links, devices, strict=True))
        problems.append(f"the {links[0].client.host_noun}s have different kinds of devices: {kinds}")
    return problems
