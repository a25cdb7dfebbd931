"""What an engine is to the launcher."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ... import devices
from ...events import Event, Failure, Phase
from ...stream.record import RunRecord
from .. import compiler
from ..control import Control
from ..job import Job, StartMethod

Deliver = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: values by rank, or failures with the ranks that were stopped because of them.

    `was_stopped` says that somebody asked for it, and that workers were ended for it; `hang` where each rank was when
    they were ended because nothing went on any more. `cause` is the failure that began it all where that was on another
    node, which `where` names; `error` is what ended the run where no rank failed.
    """

    values: Mapping[int, Any] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    stopped: frozenset[int] = frozenset()
    was_stopped: bool = False
    hang: str = ""
    cause: Failure | None = None
    where: str = ""
    error: BaseException | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the run has no values to return."""
        return bool(self.failures or self.was_stopped or self.hang or self.cause or self.error)


def announcement(job: Job, remark: str = "") -> Phase:
    """Say truthfully what is started, and why so."""
    kind = job.device_kind
    count = job.local_world_size
    what = f"{count} {kind.label} process" if count == 1 else f"{count} {kind.label} processes"
    how = f" ({_START_METHODS[job.start_method]})" if job.distributed else ", this one"
    place = job.rendezvous
    node = f", node {place.node_rank} of {place.num_nodes}" if place.num_nodes > 1 else ""
    if place.is_elastic:
        node = f", a node of {place.min_nodes} to {place.num_nodes}"
    why = f": {remark}" if remark else ""
    text = "" if job.quiet else f"Launching {job.name} on {what}{how}{node}{why}."
    return Phase(rank=-1, time=time.time(), name="starting", detail=text)


_START_METHODS = {"fork": "forked", "forkserver": "from a fork server", "spawn": "spawned"}


class Engine(ABC):
    """Runs jobs in one way.

    Attributes:
        name: what `notebook_launcher(engine=...)` calls it.
        device_kind: what it runs on; None is what this machine has.
        has_workers: whether processes of their own run the function, rather than this one.
        on_this_node: whether the processes use this machine's devices, and start by one of `start_methods`.
        start_methods: those that it knows, `auto` left out.
        refuses: arguments of a launch that mean nothing here, each with the reason.
    """

    name: ClassVar[str]
    device_kind: ClassVar[devices.DeviceKind | None] = None
    has_workers: ClassVar[bool] = True
    on_this_node: ClassVar[bool] = True
    start_methods: ClassVar[tuple[StartMethod, ...]] = ("fork", "forkserver", "spawn")
    refuses: ClassVar[Mapping[str, str]] = {}

    def count(self, job: Job) -> int:
        """Return how many processes a job has that names no number; LaunchError where that cannot be known."""
        return devices.count(job.device_kind)

    def problems(self, job: Job) -> Sequence[str]:
        """Return what else hinders a job here, before anything starts; its `num_processes` may be None still."""
        return ()

    def prepares(self, job: Job) -> Callable[[], None] | None:
        """Return what each worker calls before the function: something that a fresh process can import."""
        return None

    def load(self, job: Job) -> bool:
        """Import here what each worker would import else; return whether anything was."""
        return job.start_method == "fork" and compiler.load_for(job.function)

    def remark(self, job: Job) -> str:
        """Return what is to be said of a job besides its announcement."""
        return ""

    @abstractmethod
    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end.

        KeyboardInterrupt passes through after all workers have ended. `deliver` takes every event as it comes, the
        announcement first: what the job is made of is not needed any more then. It is called with nothing now and
        then, too. `control` says when to stop.
        """
