"""Several processes on this machine: forks of this one, or fresh ones.

Where this machine is one node of several, see `nodes.agent`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.distributed import TCPStore

from ... import collector, interrupts
from ...stream.logs import make_folder
from ...stream.record import RunRecord
from ...topology import Topology
from ..agent.parent_state import ParentState
from ..checks import compiler_preload, outliving, patches
from ..job import Job
from ..supervise.control import Control
from ..supervise.delivery import Deliver
from ..supervise.local_group import LocalWorkerGroup
from ..supervise.worker_group import Attempt
from ..transfer.shared_memory import SharedPickle
from ..transfer.unpicklable import pack_job
from ..worker import environment
from . import stores
from .attempts import GroupEngine
from .base import Outcome
from .detached import local as detached
from .detached.engine import DetachingEngine
from .detached.folder import Folder
from .detached.local import LocalWatch
from .detached.watch import Watch


@dataclass(kw_only=True)
class Plan:
    """What the processes need of this one.

    Attributes:
        payload: the function and its arguments; a `SharedPickle` of them if the workers are fresh processes.
        parent_state: what the workers find of this process.
        setup: what each worker calls before the function; None for nothing.
        store: where the ranks of the current attempt meet.
    """

    payload: Any
    parent_state: ParentState
    setup: Callable[[], None] | None
    store: TCPStore | None = None


class LocalEngine(GroupEngine[Plan], DetachingEngine):
    """Starts one process for each rank on this machine."""

    name = "local"
    refuses: ClassVar[Mapping[str, str]] = {
        "address": "it starts processes on this machine, by itself",
        "tpu_mode": "each of its processes has one device; engine 'auto' or 'xla' is needed",
    }

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end; see `Engine.run`. One that is detached has a process of its own for that."""
        if self.outlives(job):
            return self.run_detached(job, record, deliver, control)
        place = job.rendezvous
        if place.num_nodes == 1 and not place.is_elastic and not place.endpoint:
            return super().run(job, record, deliver, control)
        from .nodes import agent  # only now: one machine alone needs none of it

        attempt = Attempt(job=job, record=record, deliver=deliver, control=control)
        with self.plan(job) as plan:
            return agent.run_node(
                attempt, plan.payload, plan.parent_state, plan.setup, announcement=self.announce(job)
            )

    def detach(self, job: Job, record: RunRecord) -> Folder:
        """Start the process that runs a job without this one."""
        if job.log_dir is not None:
            make_folder(job.log_dir)  # another process writes there: what is wrong is told now
        with self.plan(job) as plan:
            return detached.start_driver(job, plan.payload, plan.parent_state)

    def make_watch(self, folder: Folder, record: RunRecord, deliver: Deliver, control: Control) -> Watch:
        """Return what shows the run."""
        return LocalWatch(folder, record, deliver, control)

    def describe_work(self, job: Job) -> str:
        """Return how many processes run what, and where that is another machine."""
        count = "1 process" if job.local_world_size == 1 else f"{job.local_world_size} processes"
        folder = self._folder
        where = "" if folder is None or folder.is_local else f" of {folder.read_metadata().get('host')}"
        return f"{job.name} on {count}{where}"

    def describe_detached_launch(self, job: Job) -> Sequence[str]:
        """Return what the cell says first, and what may end such a run or make it differ."""
        return [self.announce(job).detail, outliving.describe_killer(), patches.describe(job)]

    def problems(self, job: Job) -> Sequence[str]:
        """Return why a run cannot outlive this process."""
        place = job.rendezvous
        if job.options.get("detach") and (place.num_nodes > 1 or place.is_elastic or place.endpoint):
            return ["detach=True with a notebook on each node: launch on hosts or by SLURM, or leave it out"]
        return []

    @contextlib.contextmanager
    def plan(self, job: Job) -> Iterator[Plan]:
        """Copy the function and this process's state, for workers that are no forks; ShipError where it cannot be."""
        if job.start_method == "fork":
            compiler_preload.load_for(job.function)
            _import_for_forks()
        with contextlib.ExitStack() as stack:
            payload: Any = (job.function, job.args)
            if job.start_method != "fork":
                pickled = pack_job(job.function, job.args, job.name, share=not self.outlives(job))
                with interrupts.delay_interrupt():
                    payload = stack.enter_context(contextlib.closing(SharedPickle(pickled)))
            needed = [compiler_preload.MODULE] if compiler_preload.is_needed_by(job.function) else []
            state = ParentState.capture(job, needed)
            plan = Plan(payload=payload, parent_state=state, setup=self.worker_setup(job))
            try:
                yield plan
            finally:
                plan.store = None  # this closes it, also where a kept error keeps the plan

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return how many processes start, on which devices, and how."""
        return self.announce(job).detail

    def make_group(self, plan: Plan, attempt: Attempt) -> LocalWorkerGroup:
        """Return the processes of an attempt, which meet at a new store: the last one's has old addresses."""
        job = attempt.job
        plan.store = None  # the next one may need its port
        plan.store = stores.open_store(job.rendezvous)
        environments = make_environments(job, plan.parent_state, plan.store.port, attempt.number)
        return LocalWorkerGroup(
            attempt,
            payload=plan.payload,
            environments=environments,
            parent_state=plan.parent_state,
            setup=plan.setup,
        )


def make_environments(
    job: Job, parent_state: ParentState, port: int, attempt: int = 0
) -> dict[int, Mapping[str, str]]:
    """Return all variables of each worker, by rank, where this machine is alone.

    Args:
        job: what runs.
        parent_state: has the variables of this process.
        port: of the store at which the ranks meet.
        attempt: how often the workers were started before.
    """
    count = job.local_world_size
    environments: dict[int, Mapping[str, str]] = {}
    for rank in range(count):
        place = Topology(rank=rank, local_rank=rank, world_size=count, local_world_size=count)
        variables = environment.list_rank_variables(
            place, job, address=job.rendezvous.address, port=port, attempt=attempt
        )
        environments[rank] = environment.make_environment(
            job, parent_state.variables, variables, is_alone=True
        )
    return environments


def _import_for_forks() -> None:
    """Import what most functions use of this package: each worker would else do it."""
    with interrupts.delay_interrupt(), contextlib.suppress(Exception), collector.pause():
        importlib.import_module("notebook_accel.accelerator")
