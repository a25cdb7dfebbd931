"""The processes of this node, one of several, under an agent of torch elastic.

Torch elastic does the rendezvous, the ranks and the restarts. The processes are started and watched here: their events
are waited for instead of polled, and unlike torch's own agent this needs no signal handlers and no files.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource

from .... import interrupts
from ....events import Notice, Phase
from ....topology import Topology
from ...agent.parent_state import ParentState
from ...supervise.control import StopAsked
from ...supervise.local_group import LocalWorkerGroup
from ...supervise.worker_group import Attempt
from ...transfer import failures
from ...worker import environment
from ..attempts import INTERRUPT_GRACE, STOP_GRACE, describe_cause, make_outcome
from ..base import Outcome
from .meeting import NodeRendezvous
from .outcomes import RestartCause
from .rendezvous import OTHERS_START_AGAIN

_LOOK_SECONDS = 0.05
_TELL_SECONDS = 2.0  # in which ranks of other nodes say where they hang
_NEWS_SHARE = 0.25  # of hang_timeout, after which the nodes exchange when they heard of a rank last
_AGENT_SLEEP = (
    1e-6  # seconds; torch's agent sleeps before it looks at the workers, ours waits for events instead
)


def run_node(
    attempt: Attempt,
    payload: Any,
    parent_state: ParentState,
    setup: Callable[[], None] | None,
    *,
    announcement: Phase,
) -> Outcome:
    """Run this node's part of a job, in as many attempts as the nodes agree on.

    Args:
        attempt: the first one.
        payload: the function and its arguments; a `SharedPickle` of them if the workers are fresh processes.
        parent_state: what the workers find of this process.
        setup: each worker calls it before the function; None for nothing.
        announcement: says that the run begins.

    Raises:
        LaunchError: the nodes do not meet, or the workers cannot start.
        KeyboardInterrupt: the cell was interrupted; all workers have ended.
    """
    with contextlib.ExitStack() as stack:
        handler = NodeRendezvous(attempt.job)
        stack.callback(handler.shutdown)
        handler.check = attempt.control.check
        handler.tell = lambda text: attempt.deliver([Notice(rank=-1, time=time.time(), text=text)])
        agent = _Agent(attempt, handler, payload, parent_state, setup)
        stack.callback(agent.close)
        attempt.deliver([announcement])
        return handler.conclude(agent.run_attempts, attempt.record)


class _UnreadEvent(Event):
    """An event for nobody: torch's own tell the name of the machine, for which a name server may be asked."""

    def serialize(self) -> str:
        """Return nothing to write."""
        return ""


_UNREAD = _UnreadEvent(name="", source=EventSource.AGENT)


class _Agent(SimpleElasticAgent):
    """An agent of torch elastic whose workers are a `LocalWorkerGroup`.

    Args:
        attempt: the first one.
        handler: the rendezvous of the nodes.
        payload: see `run_node`.
        parent_state: likewise.
        setup: likewise.
    """

    def __init__(
        self,
        attempt: Attempt,
        handler: NodeRendezvous,
        payload: Any,
        parent_state: ParentState,
        setup: Callable[[], None] | None,
    ) -> None:
        job = attempt.job
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
        self._attempt = attempt
        self._job = job
        self._record = attempt.record
        self._payload = payload
        self._setup = setup
        self._parent_state = parent_state
        self._group: LocalWorkerGroup | None = None
        self._num_groups = 0
        self._restarts_left = job.max_restarts
        self._stopped: frozenset[int] = frozenset()
        self._hang = ""
        self._cause: RestartCause | None = None
        self._patient_until: float | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._num_groups:
            self._announce_restart(worker_group)
        else:
            self._remaining_restarts = max(0, self._remaining_restarts - self._handler.num_missed)
        self._num_groups += 1
        self._hang, self._patient_until = "", None
        self._restarts_left = self._remaining_restarts
        environments = {
            worker.global_rank: self._make_environment(worker, worker_group)
            for worker in worker_group.workers
        }
        self._group = LocalWorkerGroup(
            replace(self._attempt, number=self._handler.attempt, share_stop=self._handler.share_stop),
            payload=self._payload,
            environments=environments,
            parent_state=self._parent_state,
            setup=self._setup,
        )
        self._group.start()
        return {worker.local_rank: self._group.pids[worker.global_rank] for worker in worker_group.workers}

    def _make_environment(self, worker: Any, group: WorkerGroup) -> Mapping[str, str]:
        handler, num_nodes = self._handler, group.group_world_size or 1
        place = Topology(
            rank=worker.global_rank,
            local_rank=worker.local_rank,
            world_size=worker.world_size,
            local_world_size=group.spec.local_world_size,
            node_rank=group.group_rank or 0,
            num_nodes=num_nodes,
        )
        variables = environment.list_rank_variables(
            place,
            self._job,
            address=str(group.master_addr),
            port=int(group.master_port or 0),
            attempt=handler.attempt,
        )
        return environment.make_environment(
            self._job,
            self._parent_state.variables,
            variables,
            is_alone=num_nodes == 1,
            interface=handler.interface,
        )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if text := self._handler.describe_shortage():
            self._handler.tell(text)
        self._cause = None if self._remaining_restarts == self._restarts_left else self._find_cause()
        if self._cause is not None:
            self._handler.share_cause(self._cause)  # before this node leaves the round, which others notice
        super()._restart_workers(worker_group)

    def _find_cause(self) -> RestartCause:
        """Return why the workers of this node start again after a failure here."""
        restart = self._job.max_restarts - self._remaining_restarts
        text = f"{describe_cause(self._record, self._hang)}; restart {restart} of {self._job.max_restarts}"
        found = self._record.failures
        follows = bool(found) and not self._hang and failures.is_lost_peer(failures.find_first(found))
        return RestartCause(text=text, follows=follows)

    def _announce_restart(self, group: WorkerGroup) -> None:
        """Say in the cell why the workers start again: because of a failure here, or of another node."""
        own, others = self._cause, self._handler.explain_restart(group.workers[0].world_size)
        is_first = own is not None and not (own.follows and others)
        detail = own.text if own is not None and is_first else others or OTHERS_START_AGAIN
        self._attempt.deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=detail)])

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._group is not None
        state = self._group.watch(self._job.monitor_interval)
        self._share_news()
        if state == "running" and self._handler.is_called_off and not self._group.hang_watch.is_asking:
            self._remaining_restarts = 0
            state = "failed"
        if state == "running":
            return RunResult(state=WorkerState.HEALTHY)
        if state == "stopped":
            self._group.stop(STOP_GRACE, signal.SIGTERM)
            self._stopped = frozenset(self._group.stopped_ranks)
            raise StopAsked
        if state in ("failed", "hung"):
            self._hang = self._group.hang
            if state == "hung":
                self._wait_for_reports()
            self._group.settle()
            if state == "failed" and self._is_failure_of_other_node():
                return RunResult(state=WorkerState.HEALTHY)  # the agent then asks the handler for the reason
            if self._handler.is_called_off:
                self._remaining_restarts = 0
            self._stopped = frozenset(self._group.stopped_ranks)
            return RunResult(state=WorkerState.FAILED)
        if not self._handler.finish_attempt():
            self._check_patiently()
            time.sleep(self._job.monitor_interval)
            return RunResult(state=WorkerState.HEALTHY)
        values = dict.fromkeys((worker.global_rank for worker in worker_group.workers), None)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _check_patiently(self) -> None:
        """Obey a stop while others end; ranks that stop for it, too, have their time."""
        interrupts.obey_interrupt()
        control, now = self._attempt.control, time.monotonic()
        if self._patient_until is None:
            self._patient_until = now + control.grace if control.stop_is_asked else now
        if control.signum is not None or now >= self._patient_until:
            control.check()

    def _share_news(self) -> None:
        """Tell other nodes when a rank was heard last, and hear it from them: silent ranks may wait for theirs."""
        if self._job.hang_timeout is not None:
            assert self._group is not None
            watch = self._group.hang_watch
            heard, ask = self._handler.share_news(
                watch.news, ask=watch.has_asked, every=self._job.hang_timeout * _NEWS_SHARE
            )
            watch.hear_others(heard, ask=ask)

    def _wait_for_reports(self) -> None:
        """Give other nodes time to report where their ranks hang: these fail as soon as the ranks of this node end."""
        assert self._group is not None
        deadline = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < deadline:
            self._group.poll(_LOOK_SECONDS)

    def _is_failure_of_other_node(self) -> bool:
        """Return whether workers failed only because another node was lost, or restarts its workers."""
        handler = self._handler
        if not handler.seconds_to_notice or not self._record.failures:
            return False
        first = failures.find_first(self._record.failures)
        return failures.is_lost_peer(first) and handler.wait_for_change(handler.seconds_to_notice)

    def _construct_event(self, *args: Any, **kwargs: Any) -> Event:
        return _UNREAD

    def _exit_barrier(self) -> None:
        return

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.close()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.close()

    def close(self) -> None:
        """End all workers that still run. An interrupt of the user is delayed until they have ended."""
        if self._group is not None:
            with interrupts.delay_interrupt():
                self._group.stop(INTERRUPT_GRACE)
                self._group.close()
                self._group = None
        self._worker_group.store = self._store = (
            None  # this closes the store: the next attempt may need its port
        )

    def run_attempts(self) -> Outcome:
        """Run the workers, and restart them after failures up to `max_restarts` times; return how they ended here."""
        was_stopped = False
        try:
            self.run()
        except StopAsked:
            was_stopped = True
        except DistError as error:  # of torch's agent, which asks the store for ranks
            raise self._handler.make_host_error(error) from None
        return make_outcome(self._record, self._stopped, hang=self._hang, was_stopped=was_stopped)
