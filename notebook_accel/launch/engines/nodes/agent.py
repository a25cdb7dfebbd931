"""The processes of this node, one of several, whose notebooks meet."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Literal

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
from .meeting import NodeRendezvous, Seat
from .outcomes import RestartCause
from .waiting import OTHERS_START_AGAIN

_LOOK_SECONDS: Final = 0.05
_TELL_SECONDS: Final = 2.0  # in which ranks of other nodes say where they hang
_NEWS_SHARE: Final = 0.25  # of hang_timeout, after which the nodes exchange when they heard of a rank last

_End = Literal["done", "failed", "stopped", "again"]


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

    def tell(text: str) -> None:
        attempt.deliver([Notice(rank=-1, time=time.time(), text=text)])

    nodes = NodeRendezvous(attempt.job, attempt.control.check, tell)
    try:
        agent = _NodeAgent(attempt, nodes, payload, parent_state, setup)
        attempt.deliver([announcement])
        return agent.run()
    except BaseException as error:
        if (outcome := nodes.give_up(error)) is not None:
            return outcome
        raise
    finally:
        nodes.leave()


class _NodeAgent:
    """Starts the workers of this node whenever the nodes have met, and watches them.

    Args:
        attempt: the first one.
        nodes: how they meet.
        payload: see `run_node`.
        parent_state: likewise.
        setup: likewise.
    """

    def __init__(
        self,
        attempt: Attempt,
        nodes: NodeRendezvous,
        payload: Any,
        parent_state: ParentState,
        setup: Callable[[], None] | None,
    ) -> None:
        self._nodes, self._attempt, self._payload = nodes, attempt, payload
        self._job, self._record = attempt.job, attempt.record
        self._setup, self._parent_state = setup, parent_state
        self._group: LocalWorkerGroup | None = None
        self._restarts_left = attempt.job.max_restarts
        self._stopped: frozenset[int] = frozenset()
        self._cause: RestartCause | None = None
        self._hang = ""

    def run(self) -> Outcome:
        """Run the workers, and restart them after failures up to `max_restarts` times; return how the run ended."""
        nodes, record = self._nodes, self._record
        seat: Seat | None = None
        while True:
            end: _End = "stopped"
            try:
                seat = self._meet(seat)
                self._start(seat)
                end = self._watch()
            except StopAsked:
                pass
            finally:
                self.close()
            if end == "failed" and self._restarts_left:
                self._restarts_left -= 1
                self._cause = self._find_cause()
                nodes.share_cause(self._cause)  # before this node meets the others again
                continue
            if end == "again":
                continue
            outcome = make_outcome(record, self._stopped, hang=self._hang, was_stopped=end == "stopped")
            is_complete = len(record.results) >= self._job.local_world_size
            agreed = nodes.finish(outcome, record.results.get(0), is_complete=is_complete)
            if agreed is not None:
                return agreed

    def _meet(self, last: Seat | None) -> Seat:
        """Meet the other nodes; where they had met before, say what for."""
        nodes, cause = self._nodes, self._cause
        if last is None:
            seat = nodes.meet()
            self._restarts_left = max(0, self._restarts_left - nodes.num_missed)
            return seat
        if text := nodes.describe_shortage():
            nodes.tell(text)
        self._cause = None
        seat = nodes.meet()
        others = nodes.explain_restart(seat.world_size)
        is_first = cause is not None and not (cause.follows and others)
        detail = cause.text if cause is not None and is_first else others or OTHERS_START_AGAIN
        self._attempt.deliver([Phase(rank=-1, time=time.time(), name="restarting", detail=detail)])
        return seat

    def _start(self, seat: Seat) -> None:
        self._hang = ""
        ranks = range(seat.first_rank, seat.first_rank + self._job.local_world_size)
        self._group = LocalWorkerGroup(
            replace(self._attempt, number=self._nodes.attempt, share_stop=self._nodes.share_stop),
            payload=self._payload,
            environments={rank: self._make_environment(rank, seat) for rank in ranks},
            parent_state=self._parent_state,
            setup=self._setup,
        )
        self._group.start()

    def _make_environment(self, rank: int, seat: Seat) -> Mapping[str, str]:
        place = Topology(
            rank=rank,
            local_rank=rank - seat.first_rank,
            world_size=seat.world_size,
            local_world_size=self._job.local_world_size,
            node_rank=seat.node_rank,
            num_nodes=seat.num_nodes,
        )
        variables = environment.list_rank_variables(
            place, self._job, address=seat.address, port=seat.port, attempt=self._nodes.attempt
        )
        return environment.make_environment(
            self._job,
            self._parent_state.variables,
            variables,
            is_alone=seat.num_nodes == 1,
            interface=self._nodes.interface,
        )

    def _find_cause(self) -> RestartCause:
        """Return why the workers of this node start again after a failure here."""
        restart = self._job.max_restarts - self._restarts_left
        text = f"{describe_cause(self._record, self._hang)}; restart {restart} of {self._job.max_restarts}"
        found = self._record.failures
        follows = bool(found) and not self._hang and failures.is_lost_peer(failures.find_first(found))
        return RestartCause(text=text, follows=follows)

    def _watch(self) -> _End:
        """Return how the workers of this node ended, or that the nodes are to meet again."""
        while True:
            if (end := self._look()) is not None:
                return end
            self._nodes.hear_all()
            if self._nodes.is_called and not self._nodes.is_called_off:
                return "again"

    def _look(self) -> _End | None:
        """Wait a moment for news of the workers; return how they ended, None where they or others go on."""
        group, nodes = self._group, self._nodes
        assert group is not None
        state = group.watch(self._job.monitor_interval)
        self._share_news()
        if state == "running":
            if not nodes.is_called_off or group.hang_watch.is_asking:
                return None
            state = "failed"
        if state == "stopped":
            group.stop(STOP_GRACE, signal.SIGTERM)
            self._stopped = frozenset(group.stopped_ranks)
            return "stopped"
        if state in ("failed", "hung"):
            self._hang = group.hang
            if state == "hung":
                self._wait_for_reports()
            group.settle()
            if state == "failed" and self._is_failure_of_other_node():
                return None  # the others say why
            if nodes.is_called_off:
                self._restarts_left = 0
            self._stopped = frozenset(group.stopped_ranks)
            return "failed"
        return "done"

    def _share_news(self) -> None:
        """Tell other nodes when a rank was heard last, and hear it from them: silent ranks may wait for theirs."""
        if self._job.hang_timeout is not None:
            assert self._group is not None
            watch = self._group.hang_watch
            heard, ask = self._nodes.share_news(
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
        found = self._record.failures
        return (
            bool(found) and failures.is_lost_peer(failures.find_first(found)) and self._nodes.wait_for_word()
        )

    def close(self) -> None:
        """End all workers that still run. An interrupt of the user is delayed until they have ended."""
        if self._group is not None:
            with interrupts.delay_interrupt():
                self._group.stop(INTERRUPT_GRACE)
                self._group.close()
                self._group = None
