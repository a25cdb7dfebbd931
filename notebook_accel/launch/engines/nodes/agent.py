"""The workers of this node, one of several, whose notebooks meet."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from ....events import Notice, Phase
from ....topology import Topology
from ...agent.parent_state import ParentState
from ...supervise.control import StopAsked
from ...supervise.local_group import LocalWorkerGroup
from ...supervise.worker_group import Attempt, GroupState
from ...transfer import failures
from ...worker import environment
from ..attempts import describe_cause, make_outcome, run_attempt
from ..base import Outcome
from .meeting import NodeRendezvous, Seat
from .outcomes import RestartCause

_LOOK_SECONDS: Final = 0.05
_TELL_SECONDS: Final = 2.0  # in which ranks of other nodes say where they hang
_NEWS_SHARE: Final = 0.25  # of hang_timeout, after which the nodes exchange when they heard of a rank last
_OTHERS_START_AGAIN: Final = "another node starts its workers again"


class NodeWorkerGroup(LocalWorkerGroup):
    """The workers of this node in an attempt of several nodes.

    Args:
        attempt: the job, and the ways to the run.
        nodes: how the nodes have met.
        seat: the place of this one.
        payload: the function and its arguments; a `SharedPickle` of them if the workers are fresh processes.
        parent_state: what the workers find of this process.
        setup: each worker calls it before the function; None for nothing.
    """

    def __init__(
        self,
        attempt: Attempt,
        nodes: NodeRendezvous,
        seat: Seat,
        payload: Any,
        parent_state: ParentState,
        setup: Callable[[], None] | None,
    ) -> None:
        ranks = range(seat.first_rank, seat.first_rank + attempt.job.local_world_size)
        super().__init__(
            replace(attempt, number=nodes.attempt, share_stop=nodes.share_stop),
            payload=payload,
            environments={
                rank: _make_environment(attempt, nodes, seat, parent_state, rank) for rank in ranks
            },
            parent_state=parent_state,
            setup=setup,
        )
        self._nodes = nodes

    def watch(self, timeout: float = math.inf) -> GroupState:
        """Deliver what comes until the attempt has to end, here or on all nodes; see `WorkerGroup.watch`."""
        nodes = self._nodes
        while True:
            state = super().watch(self._job.monitor_interval)
            self._share_news()
            nodes.hear_all()
            if state == "hung":
                self._wait_for_reports()
            elif state == "failed":
                self.settle()
                if self._is_failure_of_other_node():
                    return "again"  # the others say why
            elif state == "running" and nodes.is_called_off:
                if self.hang_watch.is_asking:
                    continue
                return "failed"
            elif state == "running":
                if not nodes.is_called:
                    continue
                return "again"
            return state

    def _share_news(self) -> None:
        """Tell other nodes when a rank was heard last, and hear it from them: silent ranks may wait for theirs."""
        if self._job.hang_timeout is not None:
            every = self._job.hang_timeout * _NEWS_SHARE
            watch = self.hang_watch
            heard, ask = self._nodes.share_news(watch.news, ask=watch.has_asked, every=every)
            watch.hear_others(heard, ask=ask)

    def _wait_for_reports(self) -> None:
        """Give other nodes time to report where their ranks hang: these fail as soon as the ranks of this node end."""
        deadline = time.monotonic() + _TELL_SECONDS
        while time.monotonic() < deadline:
            self.poll(_LOOK_SECONDS)

    def _is_failure_of_other_node(self) -> bool:
        """Return whether workers failed only because another node was lost, or restarts its workers."""
        found = self._record.failures
        return (
            bool(found) and failures.is_lost_peer(failures.find_first(found)) and self._nodes.wait_for_word()
        )


def _make_environment(
    attempt: Attempt, nodes: NodeRendezvous, seat: Seat, parent_state: ParentState, rank: int
) -> Mapping[str, str]:
    job = attempt.job
    place = Topology(
        rank=rank,
        local_rank=rank - seat.first_rank,
        world_size=seat.world_size,
        local_world_size=job.local_world_size,
        node_rank=seat.node_rank,
        num_nodes=seat.num_nodes,
    )
    variables = environment.list_rank_variables(
        place, job, address=seat.address, port=seat.port, attempt=nodes.attempt
    )
    is_alone = seat.num_nodes == 1
    return environment.make_environment(
        job, parent_state.variables, variables, is_alone=is_alone, interface=nodes.interface
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
        payload: as for `NodeWorkerGroup`.
        parent_state: likewise.
        setup: likewise.
        announcement: says that the run begins.

    Raises:
        LaunchError: the nodes do not meet, or the workers cannot start.
        KeyboardInterrupt: the cell was interrupted; all workers have ended.
    """

    def tell(text: str) -> None:
        attempt.deliver([Notice(rank=-1, time=time.time(), text=text)])

    nodes = NodeRendezvous(attempt.job, attempt.control, tell)
    try:
        attempt.deliver([announcement])
        return _run_attempts(attempt, nodes, payload, parent_state, setup)
    except BaseException as error:
        if (outcome := nodes.give_up(error)) is not None:
            return outcome
        raise
    finally:
        nodes.leave()


def _run_attempts(attempt: Attempt, nodes: NodeRendezvous, *way: Any) -> Outcome:
    """Start the workers whenever the nodes have met, until all agree on how the run ended."""
    job, record = attempt.job, attempt.record
    restarts, seat, cause = 0, None, None
    while True:
        state: GroupState = "stopped"
        group: NodeWorkerGroup | None = None
        with contextlib.suppress(StopAsked):
            had_met, seat = seat is not None, nodes.meet()
            if had_met:
                detail = _explain(nodes, cause, seat)
                attempt.deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=detail)])
            restarts, cause = restarts + nodes.num_missed, None
            group = NodeWorkerGroup(attempt, nodes, seat, *way)
            state = run_attempt(group)
        hang = group.hang if group is not None else ""
        if state in ("failed", "hung") and restarts < job.max_restarts and not nodes.is_called_off:
            restarts += 1
            text = f"{describe_cause(record, hang)}; restart {restarts} of {job.max_restarts}"
            found = record.failures
            follows = bool(found) and not hang and failures.is_lost_peer(failures.find_first(found))
            cause = RestartCause(text=text, follows=follows)
            nodes.share_cause(cause)  # before this node meets the others again
        elif state != "again":
            stopped = group.stopped_ranks if group is not None else ()
            outcome = make_outcome(record, stopped, hang=hang, was_stopped=state == "stopped")
            is_complete = len(record.results) >= job.local_world_size
            agreed = nodes.finish(outcome, record.results.get(0), is_complete=is_complete)
            if agreed is not None:
                return agreed


def _explain(nodes: NodeRendezvous, cause: RestartCause | None, seat: Seat) -> str:
    """Return why workers start again: because of a failure here, or of another node."""
    others = nodes.explain_restart(seat.world_size)
    is_first = cause is not None and not (cause.follows and others)
    return cause.text if cause is not None and is_first else others or _OTHERS_START_AGAIN
