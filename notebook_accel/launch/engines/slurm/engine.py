"""Ranks on the nodes of a SLURM cluster: of the allocation that this process runs in, or of a job that it submits."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from .... import environ
from ....config.slurm import normalize
from ....devices import DeviceKind
from ....errors import LaunchError
from ....events import Event, Notice
from ....stream.logs import make_folder
from ....stream.record import RunRecord
from ... import signals
from ...job import Job
from ...supervise.control import Control
from ...supervise.delivery import Deliver
from ...supervise.stop_agreement import StopAgreement
from ...supervise.worker_group import Attempt
from ..base import Outcome
from ..detached.engine import DetachingEngine
from ..detached.folder import Folder
from ..remote.client import Wanted
from ..remote.hosts_engine import HostsEngine, copy, uses_cpu
from ..remote.hosts_group import HostMember, HostsWorkerGroup, Lender, Plan
from ..remote.pool import get_pool
from . import command, detached, submission
from .allocation import Allocation, SlurmNodes
from .detached import JobWatch, Work
from .submission import Wish

_JOB: Final = "SLURM_JOB_ID"
_BY_SLURM: Final = (-signal.SIGTERM, -signal.SIGKILL)
_END_SECONDS: Final = 60.0  # sites give processes half a minute between SIGTERM and SIGKILL


class SlurmEngine(HostsEngine, DetachingEngine):
    """Starts ranks as steps of a job: an agent for each node, by `srun`.

    Without an allocation it submits a job by `sbatch`, waits for it, and keeps it some time for the next launch. In an
    allocation of `salloc`, or in a job, it submits nothing.
    """

    _nodes: SlurmNodes | None = None  # of a run that is not detached

    name = "slurm"
    drives_nodes = True
    refuses: ClassVar[Mapping[str, str]] = {
        "address": "SLURM's own settings say where the cluster is",
        "tpu_mode": "ranks of SLURM use GPUs or CPUs",
        "secret": "SLURM proves by its own key who talks to its nodes",
    }

    def count(self, options: Mapping[str, Any], kind: DeviceKind) -> int:
        """Return how many ranks a launch has that does not say it: one for each GPU that is asked for, or a node."""
        nodes = self._count_nodes(options)
        if environ.get(_JOB):
            return nodes * _count_gpus_here(options)
        return nodes * _count_gpus(normalize(options["slurm"] or {}))

    def problems(self, job: Job) -> list[str]:
        """Return why SLURM cannot run it, a sentence each; what SLURM itself would refuse is asked for."""
        if missing := command.find_missing():
            return [
                f"engine='slurm': there is no program {missing!r} here: launch on a node of a SLURM cluster"
            ]
        if isinstance(job.options["python"], Mapping):
            return ["python= is a dict: with engine='slurm' all nodes have the same Python, name its path"]
        try:
            nodes = self._count_nodes(job.options)
            if job.local_world_size % nodes:
                return [
                    f"num_processes={job.local_world_size} with num_nodes={nodes}: every node has as many ranks, so it "
                    f"has to be a multiple of {nodes}"
                ]
            if (job_id := environ.get(_JOB)) and self.outlives(job):
                return [
                    f"detach=True inside the allocation of job {job_id}: what runs there ends with it, unset {_JOB} "
                    "to submit a job of its own"
                ]
            if job_id:
                return _check_allocation(job_id, nodes)
        except LaunchError as error:
            return str(error).splitlines()
        wish = self._make_wish(job)
        problems = [] if get_pool().has_kept(wish.key) else submission.check(wish)
        gpus = _count_gpus(wish.options, default=0)
        if gpus and wish.ranks_per_node > gpus and not uses_cpu(job.environment):
            problems.append(
                f"num_processes={job.local_world_size} with num_nodes={nodes}: {wish.ranks_per_node} ranks of a node "
                f"need as many GPUs, and slurm= asks for {gpus}"
            )
        return problems

    def describe_place(self) -> str:
        """Return the number of the job, once there is one."""
        if self._nodes is not None and self._nodes.job_id:
            return f"job {self._nodes.job_id}"
        return super().describe_place()

    def describe_interrupt(self, job: Job, record: RunRecord) -> str:
        """Return what has become of a run whose cell was interrupted."""
        if self._nodes is not None and self._nodes.withdrawn:
            return f"{job.name}: job {self._nodes.withdrawn} was cancelled, it had not begun"
        return super().describe_interrupt(job, record)

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end; one that is detached, in a job of SLURM that goes on without this process."""
        if not job.options.get("detach"):
            return super().run(job, record, deliver, control)
        try:
            return self.run_detached(job, record, deliver, control)
        finally:
            get_pool().end_wait(record)

    def detach(self, job: Job, record: RunRecord) -> Folder:
        """Submit a job that goes on without this process."""
        if job.log_dir is not None:
            make_folder(job.log_dir)  # another process writes there: what is wrong is told now
        pickled, origin = self.take(job)
        # nodes that wait for the next launch could be those that this one waits for
        get_pool().make_room(record, Allocation)
        work = Work(pickled=copy(pickled), origin=origin, wanted=self.describe_wanted())
        return detached.submit(job, work, self._make_wish(job))

    def make_watch(self, folder: Folder, record: RunRecord, deliver: Deliver, control: Control) -> JobWatch:
        """Return what shows the run."""
        return JobWatch(folder, record, deliver, control)

    def describe_work(self, job: Job) -> str:
        """Return how many processes run what, on how many nodes."""
        return f"{job.name} on {describe_size(job.local_world_size, self._count_nodes(job.options))}"

    def describe_detached_launch(self, job: Job) -> Sequence[str]:
        """Return how the run is launched."""
        return [f"Launching {self.describe_work(job)} by SLURM."]

    def count_ranks(self, job: Job) -> list[int]:
        """Return the number of ranks of each node."""
        nodes = self._count_nodes(job.options)
        return [job.local_world_size // nodes] * nodes

    def make_lender(self, job: Job) -> Lender:
        """Return what has the nodes of a run."""
        keep = float(job.options["slurm_keep"])
        wish, wanted = self._make_wish(job), self.describe_wanted()
        notice = float(job.options["slurm_notice"])
        self._nodes = SlurmNodes(
            wish, environ.get(_JOB) or "", keep, wanted, notice=notice, use_cpu=uses_cpu(job.environment)
        )
        return self._nodes

    def describe_wanted(self) -> Wanted:
        """Return what the environment of the nodes has to be."""
        return Wanted.here()

    def make_session_group(self, job: Job, attempt: Attempt) -> HostsWorkerGroup:
        """Return workers that serve the calls of a session, and say how long their nodes stay after it."""
        keep = float(job.options["slurm_keep"])
        if keep and not environ.get(_JOB):
            text = f"The session's nodes stay {keep:g} s after its end for the next launch."
            attempt.deliver([Notice(rank=-1, time=time.time(), text=text)])
        return super().make_session_group(job, attempt)

    def make_group(self, plan: Plan, attempt: Attempt) -> HostsWorkerGroup:
        """Return the ranks of an attempt."""
        return SlurmWorkerGroup(attempt, plan)

    def describe_launch(self, job: Job, plan: Plan) -> str:
        """Return how many ranks start, and in which job."""
        what = describe_size(job.local_world_size, len(plan.counts))
        if job_id := environ.get(_JOB):
            unused = "; slurm= has no effect there" if job.options["slurm"] else ""
            return f"Launching {job.name} on {what} in the allocation of job {job_id}{unused}."
        keep = float(job.options["slurm_keep"])
        stays = f"; its nodes stay {keep:g} s for the next launch" if keep else ""
        return f"Launching {job.name} on {what} by SLURM{stays}."

    def _count_nodes(self, options: Mapping[str, Any]) -> int:
        text = str(options["num_nodes"])
        if not text.isdecimal():
            raise LaunchError(f"num_nodes={options['num_nodes']!r} with engine='slurm': a number is needed")
        return int(text)

    def _make_wish(self, job: Job) -> Wish:
        nodes = self._count_nodes(job.options)
        return Wish(
            num_nodes=nodes,
            ranks_per_node=job.local_world_size // nodes,
            options=normalize(job.options["slurm"] or {}),
            python=job.options["python"],
            is_requeued=job.max_restarts > 0,
            name=job.options["name"] or job.name.rpartition(".")[2],
        )


class SlurmWorkerGroup(HostsWorkerGroup):
    """The ranks of one attempt in a job. Before its time limit they are asked to stop.

    Args:
        attempt: the job, and the ways to the run.
        plan: what the agents are asked for.
    """

    def __init__(self, attempt: Attempt, plan: Plan) -> None:
        super().__init__(attempt, plan)
        assert isinstance(plan.lender, SlurmNodes)
        self._lender = plan.lender
        self._limit = Control()
        self._before_limit = StopAgreement(self.tell, attempt.record.held, self._limit)
        self._notice = float(self._job.options["slurm_notice"])

    def on_look(self) -> None:
        """Ask the ranks to stop where the job's time is nearly over."""
        super().on_look()
        allocation = self._lender.allocation
        if (
            allocation is None
            or not allocation.state.is_nearly_over(self._notice)
            or self._job.serve is not None
        ):
            return
        if not self._limit.stop_is_asked:
            self._limit.stop(allocation.state.find_notice(self._notice))
            self._delivery.deliver([self._make_warning(allocation.job_id, allocation.state.end or 0.0)])
        self._before_limit.is_due(member.rank for member in self.list_running())

    @staticmethod
    def _make_warning(job_id: str, end: float) -> Event:
        seconds = max(0.0, end - time.time())
        text = f"job {job_id} ends in {seconds:.0f} s by its time limit: accelerator.should_stop is true now"
        return Notice(rank=-1, time=time.time(), text=text)

    def note_end(
        self, member: HostMember, exitcode: int | None, at: float, last: Sequence[Event] = ()
    ) -> None:
        """Note that a worker's process has ended; the first that a signal ended may be lost with its job.

        A cancelled job, and one whose time is over, gets its signal in all processes at once: whether a rank or its
        node's agent is heard of first is chance.

        Args:
            member: the worker.
            exitcode: of its process, negative for a signal, None where nobody knows it.
            at: when it ended, in seconds since the epoch.
            last: events that came too late for `receive`.
        """
        self._delivery.deliver(last)
        is_told = self._record.failures or self._delivery.has_outcome(member.rank)
        if (
            exitcode not in _BY_SLURM
            or is_told
            or member.rank in self.stopped_ranks
            or not self._is_job_ending()
        ):
            super().note_end(member, exitcode, at)
            return
        end = f"its process was ended by {signals.name_of(-exitcode)}"
        self.note_loss(
            member, lambda lost: self._add_job(f"{lost.link.client.host_noun} {lost.link.host}: {end}")
        )

    def _is_job_ending(self) -> bool:
        allocation = self._lender.allocation
        try:
            state = None if allocation is None else allocation.look(self._check)
            return state is not None and (state.is_being_preempted or not state.is_running)
        except LaunchError:
            return False

    def explain_loss(self, member: HostMember) -> str:
        """Return what became of a rank whose step has ended, and how its job stands."""
        return self._add_job(super().explain_loss(member))

    def _add_job(self, text: str) -> str:
        """Return what became of a rank, with how its job stands."""
        allocation = self._lender.allocation
        if allocation is None:
            return text
        try:
            allocation.look_at_end(lambda text: self._check(), _END_SECONDS)
        except LaunchError:
            return text
        said = [line for link in self._links for line in link.said]
        allocation.is_preempted |= any(map(command.tells_of_preemption, [text, *said]))
        return f"{text}; {allocation.describe_loss()}"

    def close(self) -> None:
        """Let the agents end what is left; the job of a run that was stopped is cancelled then."""
        if self._control.stop_is_asked:
            self._lender.note_stop()
        super().close()


def describe_size(count: int, nodes: int) -> str:
    """Return such as `8 processes on 2 nodes`."""
    return (
        f"{count} {'process' if count == 1 else 'processes'} on {nodes} {'node' if nodes == 1 else 'nodes'}"
    )


def _check_allocation(job_id: str, nodes: int) -> list[str]:
    """Return why the job that this process runs in has no room, a sentence each."""
    state = command.look(job_id, lambda: None)
    if not state.is_running:
        return [
            f"engine='slurm': {_JOB} is {job_id}, and that job is {state.describe()}: unset it to submit a new one"
        ]
    present = len(command.list_nodes(state, lambda: None))
    if nodes > present:
        return [f"num_nodes={nodes}: the allocation of job {job_id} has {present} nodes ({state.node_list})"]
    return []


def _count_gpus(options: Mapping[str, Any], default: int = 1) -> int:
    """Return how many GPUs a node has by the options of a job; the default where they name none.

    `gpus_per_node` is such as `4` and `a100:2,v100:2`, `gres` such as `gpu:4`, `gpu` and `gpu:a100:4(S:0-1),lustre:1`.
    """
    for name in ("gpus_per_node", "gres"):
        parts = [part.partition("(")[0].split(":") for part in str(options.get(name, "")).split(",")]
        wanted = parts if name == "gpus_per_node" else [part for part in parts if part[0] == "gpu"]
        numbers = [part[-1] if part[-1].isdecimal() else "1" for part in wanted if part != [""]]
        if number := sum(map(int, numbers)):
            return number
    return default


def _count_gpus_here(options: Mapping[str, Any]) -> int:
    """Return how many GPUs each node of this process's job has, 1 without any."""
    if uses_cpu(options["environment"] or {}):
        return 1
    text = environ.get("SLURM_GPUS_ON_NODE") or ""
    return int(text) if text.isdecimal() and int(text) else 1
