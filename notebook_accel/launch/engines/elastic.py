"""Several processes on this node, managed by torch elastic: rendezvous, ranks and restarts are elastic's.

How processes start and are watched is ours: events instead of polling, and no signal handlers, files or waits.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from ...events import Notice, Phase
from ...stream.record import RunRecord
from .. import failures, signals, variables
from ..control import Control, StopAsked
from ..crew import Crew
from ..culprit import pack_job, unpack_value
from ..job import Job
from ..segment import Segment
from ..surroundings import Surroundings
from .base import Deliver, Engine, Outcome, announcement
from .nodes.fixed import Nodes
from .nodes.rendezvous import OwnHandler, SingleNode

_INTERRUPT_GRACE = 1.5
_STOP_GRACE = 0.5
_LOOK_SECONDS = 0.05
_NEWS_SHARE = 0.25  # of the time after which silence is told
_AGENT_SLEEP = 1e-6  # elastic sleeps before each look at the workers; ours wait inside the look


class ElasticEngine(Engine):
    """Starts a process per rank under a torch elastic agent in this process."""

    name = "elastic"
    refuses: ClassVar[Mapping[str, str]] = {
        "address": "it starts processes on this machine, by itself",
        "tpu_mode": "its processes have a device each; 'auto' and 'xla' have one for all",
    }

    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job; ShipError or LaunchError where it cannot start."""
        with contextlib.ExitStack() as stack:
            payload: Any = (job.function, job.args)
            if job.start_method != "fork":
                parcel = pack_job(job.function, job.args, job.name)
                with signals.interrupt_held():
                    payload = stack.enter_context(contextlib.closing(Segment(parcel)))
            handler = _handler_for(job)
            stack.callback(handler.shutdown)
            handler.check = control.check
            handler.tell = lambda text: deliver([Notice(rank=-1, time=time.time(), text=text)])
            agent = _Agent(job, payload, handler, record, deliver, control, self.prepares(job))
            stack.callback(agent.close)
            deliver([announcement(job, self.remark(job))])
            return handler.concluded(agent.attempted, record)


def _handler_for(job: Job) -> OwnHandler:
    """Return how a node meets the others."""
    place = job.rendezvous
    if place.is_elastic:
        from .nodes.elastic import ElasticNodes  # torch's own part of it is large

        return ElasticNodes(job)
    return Nodes(job) if place.num_nodes > 1 or place.endpoint else SingleNode(place)


class _Agent(SimpleElasticAgent):
    """Torch elastic's agent, with our workers."""

    def __init__(
        self,
        job: Job,
        payload: Any,
        handler: OwnHandler,
        record: RunRecord,
        deliver: Deliver,
        control: Control,
        prepare: Callable[[], None] | None,
    ) -> None:
        spec = WorkerSpec(
            role="worker",
            local_world_size=job.local_world_size,
            entrypoint=job.function if hasattr(job.function, "__name__") else "function",
            rdzv_handler=handler,
            max_restarts=job.max_restarts,
            monitor_interval=_AGENT_SLEEP,
            master_addr=None,
            local_addr=None,
        )
        super().__init__(spec)
        self._handler = handler
        self._job = job
        self._payload = payload
        self._record = record
        self._deliver = deliver
        self._control = control
        self._prepare = prepare
        self._surroundings = Surroundings.capture(job)
        self._crew: Crew | None = None
        self._crews = 0
        self._restarts_left = job.max_restarts
        self._stopped: frozenset[int] = frozenset()
        self._hang = ""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._crews:
            self._tell_restart(worker_group, called=self._remaining_restarts == self._restarts_left)
        self._crews += 1
        self._hang = ""
        self._restarts_left = self._remaining_restarts
        environments = {
            worker.global_rank: self._environment(worker, worker_group) for worker in worker_group.workers
        }
        now = time.time()
        self._deliver([Phase(rank=rank, time=now, name="starting") for rank in environments])
        self._crew = Crew(self._job, self._payload, self._record, self._deliver, self._control, self._prepare)
        self._crew.start(environments, variables.threads(self._job), self._surroundings)
        return {worker.local_rank: self._crew.pids[worker.global_rank] for worker in worker_group.workers}

    def _environment(self, worker: Any, group: WorkerGroup) -> Mapping[str, str]:
        handler = self._handler
        return variables.of_worker(
            self._job,
            self._surroundings.variables,
            alone=(group.group_world_size or 1) == 1,
            interface=handler.interface,
            RANK=worker.global_rank,
            LOCAL_RANK=worker.local_rank,
            WORLD_SIZE=worker.world_size,
            LOCAL_WORLD_SIZE=group.spec.local_world_size,
            GROUP_RANK=group.group_rank,
            GROUP_WORLD_SIZE=group.group_world_size,
            MASTER_ADDR=group.master_addr,
            MASTER_PORT=group.master_port,
            TORCHELASTIC_USE_AGENT_STORE=handler.use_agent_store,
            TORCHELASTIC_RESTART_COUNT=handler.attempt,
            TORCHELASTIC_MAX_RESTARTS=self._job.max_restarts,
            TORCHELASTIC_RUN_ID=handler.get_run_id(),
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if text := self._handler.shortage():
            self._handler.tell(text)
        super()._restart_workers(worker_group)

    def _tell_restart(self, group: WorkerGroup, called: bool) -> None:
        """Say in the cell why workers start again: `called` by another node, or for a failure here."""
        restart = self._job.max_restarts - self._remaining_restarts
        if not called:
            cause = self._cause()
            detail = f"{cause}; restart {restart} of {self._job.max_restarts}"
        else:
            detail = self._handler.why_again(group.workers[0].world_size)
        self._deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=detail)])

    def _cause(self) -> str:
        if self._hang or not self._record.failures:
            return self._hang.partition("\n")[0]
        return failures.one_line(failures.first(self._record.failures))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._crew is not None
        state = self._crew.watch(self._job.monitor_interval)
        self._share_news()
        if state == "running" and self._handler.is_called_off and not self._crew.hang_watch.is_asking:
            self._remaining_restarts = 0
            state = "failed"
        if state == "running":
            return RunResult(state=WorkerState.HEALTHY)
        if state == "stopped":
            self._crew.stop(_STOP_GRACE, signal.SIGTERM)
            self._stopped = frozenset(self._crew.stopped_ranks)
            raise StopAsked
        if state in ("failed", "hung"):
            self._hang = self._crew.hang
            if state == "hung":
                self._let_others_tell()
            self._crew.settle()
            if state == "failed" and self._lost_for_others():
                return RunResult(state=WorkerState.HEALTHY)  # the agent then asks the handler why
            self._stopped = frozenset(self._crew.stopped_ranks)
            return RunResult(state=WorkerState.FAILED)
        if not self._handler.all_have_ended():
            self._control.check()
            time.sleep(self._job.monitor_interval)
            return RunResult(state=WorkerState.HEALTHY)
        values = dict.fromkeys((worker.global_rank for worker in worker_group.workers), None)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _share_news(self) -> None:
        """Let nodes know of each other that something goes on: what is silent here may wait for what works there."""
        if self._job.hang_timeout is not None:
            assert self._crew is not None
            watch = self._crew.hang_watch
            heard, ask = self._handler.share_news(
                watch.news, ask=watch.has_asked, every=self._job.hang_timeout * _NEWS_SHARE
            )
            watch.hear_others(heard, ask=ask)

    def _let_others_tell(self) -> None:
        """Let other nodes ask their ranks, which fail as soon as those of this one end."""
        assert self._crew is not None
        deadline = time.monotonic() + self._handler.seconds_to_tell
        while time.monotonic() < deadline:
            self._crew.poll(_LOOK_SECONDS)

    def _lost_for_others(self) -> bool:
        """Whether workers failed here only because another node was lost, or starts its own again."""
        handler = self._handler
        if not handler.seconds_to_notice:
            return False
        first = failures.first(self._record.failures)
        return failures.is_lost_peer(first) and handler.changed_within(handler.seconds_to_notice)

    def _exit_barrier(self) -> None:
        self._handler.wait_for_others()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.close()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.close()

    def close(self) -> None:
        """End all workers that still run; a second interrupt waits until they are gone."""
        if self._crew is not None:
            with signals.interrupt_held():
                self._crew.stop(_INTERRUPT_GRACE)
                self._crew.close()
                self._crew = None
        self._worker_group.store = self._store = None  # closes it: the next attempt may need its port

    def attempted(self) -> Outcome:
        """Run the workers, again where they fail and may; return how they ended here."""
        try:
            self.run()
        except StopAsked:
            return self._outcome(was_stopped=True)
        return self._outcome()

    def _outcome(self, was_stopped: bool = False) -> Outcome:
        """Return how the run ended."""
        if self._hang:  # what failed after that did so because ranks elsewhere were ended
            return Outcome(stopped=self._stopped, hang=self._hang)
        if self._record.failures:
            return Outcome(failures=tuple(self._record.failures), stopped=self._stopped)
        values = {rank: unpack_value(result) for rank, result in self._record.results.items()}
        return Outcome(values=values, stopped=self._stopped, was_stopped=was_stopped)
