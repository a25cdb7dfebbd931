"""The nodes of a launch: waited for, found, kept for the next launch, and let go."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Final

from ....errors import LaunchError
from ... import descriptors
from ..attempts import Wait
from ..remote.client import Wanted
from ..remote.hosts_engine import check_devices
from ..remote.hosts_group import QUEUED, Lender
from ..remote.link import Link
from ..remote.pool import get_pool
from . import command, submission
from .command import ENDING, JobState, SrunClient
from .submission import Wish

_LOOK_SECONDS: Final = 0.05
_FAST_SECONDS: Final = 0.25
_SLOW_SECONDS: Final = 10.0
_SETTLE_SECONDS: Final = 3.0
_LEAST_WARM_SECONDS: Final = 5.0  # between two attempts of a run
_RESTART_SECONDS: Final = 400.0  # longer than SLURM takes to note that a node is down
_OUTAGE_SECONDS: Final = 900.0
_LOST: Final = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")
_AGAIN: Final = (*_LOST, "COMPLETED", "FAILED", "UNKNOWN", "REVOKED")
_TRIES: Final = 3  # of jobs that end before the first rank begins


class Allocation:
    """A job, whose nodes take steps.

    Args:
        job_id: number of the job that this process runs in; empty to submit one.
        wish: what is submitted; None where nothing is.

    Attributes:
        job_id: number of the job.
        is_ours: whether it was submitted for a launch, and is to be cancelled.
        lock: path of the file that agents lock; empty where the job is not ours.
        state: what SLURM said of it last.
        is_preempted: whether another job got its nodes, since it ran last.
        has_ranks: whether ranks have run in it.
    """

    def __init__(self, job_id: str, wish: Wish | None = None) -> None:
        self.is_ours = wish is not None
        self._watcher: subprocess.Popen[bytes] | None = None
        self.lock = ""
        if wish is not None:
            job_id, self.lock = submission.submit(wish)
            self._watcher = command.start_watcher(job_id)
            descriptors.keep_from_forks(self)
        self.job_id = job_id
        self.state = JobState(job_id=job_id, state="PENDING")
        self._submitted = time.time()
        self._shown = self._problem = ""
        self._silent_since: float | None = None
        self._nodes: list[str] = []
        self.has_ranks = self.is_preempted = False

    def filenos(self) -> list[int]:
        """Return the descriptors that no forked process may keep."""
        pipe = self._watcher.stdin if self._watcher is not None else None
        return [pipe.fileno()] if pipe is not None and not pipe.closed else []

    def look(self, check: Callable[[], None]) -> JobState:
        """Ask SLURM how the job stands."""
        before, self.state = self.state, command.look(self.job_id, check)
        if (before.node_list, before.restarts) != (self.state.node_list, self.state.restarts):
            self._nodes = []
        self.is_preempted |= self.state.preempted is not None
        return self.state

    def wait(self, wait: Wait) -> list[str]:
        """Wait until the job runs; return its nodes.

        Args:
            wait: called several times a second, with the state.

        Raises:
            LaunchError: it has ended.
        """
        if self.state.is_running and self._nodes:  # somebody has just looked
            return self._nodes
        began = time.monotonic()
        while not self._look_patiently(wait).is_running:
            if self.state.is_over:
                raise LaunchError(self.describe_early_end())
            self._shown = self._describe_wait()
            waited = time.monotonic() - began
            until = time.monotonic() + min(_SLOW_SECONDS, max(_LOOK_SECONDS, waited / 10))
            while time.monotonic() < until:
                wait(self._shown)
                time.sleep(_LOOK_SECONDS)
        self._shown = ""
        self.is_preempted = self.state.preempted is not None
        is_new = not self._nodes
        self._nodes = nodes = command.list_nodes(self.state, lambda: wait(""))
        if self.is_ours and is_new:
            wait(
                f"Job {self.job_id}: RUNNING on {', '.join(nodes)}, after {time.time() - self._submitted:.0f} s in "
                "the queue."
            )
        return nodes

    def describe_early_end(self) -> str:
        """Return that the job has ended before the ranks began, and why, as a sentence."""
        again = " again" if self.has_ranks else ""
        return f"job {self.job_id} has ended before the ranks began{again}: {self.state.describe()}"

    def look_at_end(self, wait: Wait, seconds: float) -> JobState:
        """Ask SLURM how the job stands; while it is ending, SLURM does not say how, and is asked again.

        Args:
            wait: called several times a second.
            seconds: after which a job that is still ending is not waited for.

        Raises:
            LaunchError: SLURM does not answer.
        """
        deadline = time.monotonic() + seconds
        while self.look(lambda: wait("")).state == ENDING and time.monotonic() < deadline:
            self._pause(wait, f"Job {self.job_id} is ending: SLURM says then whether it was cancelled.")
        return self.state

    def wait_for_preemption(self, wait: Wait) -> None:
        """Wait until a job has ended whose nodes another one gets; steps that start in it now would end with it.

        Args:
            wait: called several times a second.

        Raises:
            LaunchError: SLURM does not answer.
        """
        while self.look(lambda: wait("")).is_being_preempted:
            self._pause(wait, f"Job {self.job_id} was preempted: its nodes go to another job now.")

    @staticmethod
    def _pause(wait: Wait, text: str) -> None:
        until = time.monotonic() + _FAST_SECONDS
        while time.monotonic() < until:
            wait(text)
            time.sleep(_LOOK_SECONDS)

    def describe_loss(self) -> str:
        """Return what became of the job, whose ranks ran, as a clause."""
        return self.state.describe_loss(is_preempted=self.is_preempted)

    def _look_patiently(self, wait: Wait) -> JobState:
        """Ask how the job stands; where SLURM does not answer for a time, it is taken to stand as before."""
        try:
            self.look(lambda: wait(self._shown))
        except LaunchError as error:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            if now - self._silent_since > _OUTAGE_SECONDS:
                raise
            self._problem = f" SLURM does not answer: {error}."
        else:
            self._silent_since, self._problem = None, ""
        return self.state

    def _describe_wait(self) -> str:
        start = self.state.start
        known = self.state.state == "PENDING" and start is not None and start > time.time()
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(start)) if known else "not known yet"
        since = time.strftime("%H:%M:%S", time.localtime(self.state.submitted or self._submitted))
        why = " was preempted and is queued again" if self.is_preempted else ""
        return (
            f"Job {self.job_id}{why}: {self.state.describe()}, in the queue since {since}, estimated start {when}. "
            f"Stop or interrupt to cancel it.{self._problem}{QUEUED}"
        )

    def close(self) -> None:
        """Cancel the job, if it is ours."""
        if self.is_ours:
            submission.cancel(self.job_id)
            self.is_ours = False
        if self._watcher is not None:
            command.kill_watcher(self._watcher)
            self._watcher = None


class SlurmNodes(Lender):
    """The nodes of one run.

    Args:
        wish: what is asked of SLURM.
        job_id: number of the job that this process runs in; empty to submit one.
        keep: seconds that the allocation stays for the next launch.
        wanted: what the environment of the nodes has to be.
        use_cpu: whether the ranks leave accelerators alone.
        notice: seconds before its time limit in which a job is none for another launch.

    Attributes:
        job_id: number of the job that the nodes are of, or were last; empty before there is one.
        withdrawn: number of the job that was cancelled before it began; else empty.
    """

    def __init__(
        self,
        wish: Wish,
        job_id: str,
        keep: float,
        wanted: Wanted,
        *,
        use_cpu: bool,
        notice: float = 0.0,
    ) -> None:
        self._wish, self._outer_job, self._keep, self._wanted = wish, job_id, keep, wanted
        self.job_id = ""
        self._allocation: Allocation | None = None
        self._use_cpu, self._notice = use_cpu, notice
        self.warm_seconds = max(keep, _LEAST_WARM_SECONDS)
        self._has_opened = False
        self._is_stopped = False
        self.withdrawn = ""
        self._lost_jobs = 0

    @property
    def allocation(self) -> Allocation | None:
        """The allocation, None before there is one."""
        return self._allocation

    def open(self, wait: Wait) -> list[Link]:
        """Return a connection to each node, once there are nodes."""
        deadline = time.monotonic() + (_RESTART_SECONDS if self._has_opened else 0.0)
        try:
            while True:
                allocation = self._find(wait)
                self.job_id = allocation.job_id
                nodes = allocation.wait(wait)[: self._wish.num_nodes]
                get_pool().end_wait(self)
                client = SrunClient(
                    job_id=allocation.job_id,
                    lock=allocation.lock,
                    first=nodes[0],
                    seconds=self.warm_seconds,
                )
                pythons = dict.fromkeys(nodes, self._wish.python)
                try:
                    links = get_pool().open(client, pythons, self._wanted, lambda: wait(""))
                except LaunchError as error:
                    self._explain(error, deadline, wait)
                    continue
                self._check_devices(links)
                self._has_opened = allocation.has_ranks = True
                return links
        except BaseException:
            self.give_back(is_stopped=True)
            raise

    def _check_devices(self, links: list[Link]) -> None:
        if self._use_cpu:
            return
        if problems := check_devices(links, [self._wish.ranks_per_node] * len(links)):
            for link in links:
                get_pool().put(link, is_clean=True)
            raise LaunchError("\n".join(problems))

    def _find(self, wait: Wait) -> Allocation:
        """Return the job: the one of this run, one that has rested, or a new one."""
        if self._allocation is not None:
            if not self._allocation.is_ours or not self._allocation.look(lambda: wait("")).is_over:
                return self._allocation
            if self._has_opened and self._allocation.state.state not in _AGAIN:
                raise LaunchError(
                    f"job {self._allocation.job_id} has ended: {self._allocation.state.describe()}"
                )
            self._allocation.close()
            self._allocation = None
        if self._outer_job:
            self._allocation = Allocation(self._outer_job)
            return self._allocation
        while isinstance(kept := get_pool().take_kept(self._wish.key), Allocation):
            state = kept.look(lambda: wait(""))
            if state.is_running and not state.is_nearly_over(self._notice):
                self._allocation = kept
                return kept
            kept.close()
        # nodes that wait for the next launch could be those that this one waits for
        get_pool().make_room(self, Allocation)
        self._allocation = Allocation("", self._wish)
        return self._allocation

    def _explain(self, error: LaunchError, deadline: float, wait: Wait) -> None:
        """Return where another try may succeed: the job is queued again, or has lost its nodes; else raise."""
        allocation = self._allocation
        assert allocation is not None
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until:
            state = allocation.look(lambda: wait(""))
            if allocation.is_ours and state.is_over:
                self._lost_jobs += 1
                if self._has_opened or (state.state in _LOST and self._lost_jobs < _TRIES):
                    return  # `_find` looks whether there can be a new one
                raise error
            if allocation.is_ours and state.state == ENDING:
                until = time.monotonic() + _SETTLE_SECONDS
            elif allocation.is_ours and not state.is_running:
                return
            wait("")
            time.sleep(_FAST_SECONDS)
        if time.monotonic() > deadline:
            raise error

    def find_obstacle(self, wait: Wait) -> str:
        """Return that the job has ended for good, empty where it or another one can go on."""
        if self._allocation is None:
            return ""
        try:
            self._allocation.wait_for_preemption(wait)
            state = self._allocation.look_at_end(wait, _RESTART_SECONDS)
        except LaunchError as error:
            return str(error)
        if not state.is_over or (self._allocation.is_ours and state.state in _AGAIN):
            return ""
        return self._allocation.describe_loss()

    def note_stop(self) -> None:
        """Note that somebody has stopped the run: the job is cancelled."""
        self._is_stopped = True

    def give_back(self, *, is_stopped: bool) -> None:
        """Cancel the job of a run that was stopped; else keep it for the next launch, if none waits for nodes now."""
        get_pool().end_wait(self)
        allocation, self._allocation = self._allocation, None
        if allocation is None or not allocation.is_ours:
            return
        is_over = is_stopped or self._is_stopped or allocation.state.is_nearly_over(self._notice)
        if is_over or not self._has_opened or not self._keep:
            has_begun = allocation.has_ranks or allocation.state.is_running or allocation.state.is_over
            self.withdrawn = "" if has_begun else allocation.job_id
            allocation.close()
        else:
            get_pool().keep(self._wish.key, allocation)
