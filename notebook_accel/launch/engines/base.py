"""Engine: the base class of what starts the processes of a run; and how an engine is found by its name."""

from __future__ import annotations

import difflib
import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ... import devices
from ...config.launch_options import Returns, StartMethod
from ...events import Failure, Phase
from ...stream.record import RunRecord
from ..job import Job
from ..supervise.control import Control
from ..supervise.delivery import Deliver

if TYPE_CHECKING:  # with torch, which a command line is not to wait for
    from ..supervise.worker_group import Attempt, WorkerGroup

GROUP: Final = "notebook_accel.engines"
"""The group of entry points for engines of other packages: subclasses of `Engine` that are made without arguments."""
AUTO: Final = "auto"
"""In place of an engine's name: preflight chooses the engine."""
BUILT_IN: Final[Mapping[str, str]] = {
    "inprocess": "inprocess:InProcessEngine",
    "local": "local:LocalEngine",
    "ray": "ray.engine:RayEngine",
    "slurm": "slurm.engine:SlurmEngine",
    "ssh": "ssh.engine:SshEngine",
    "xla": "xla:XlaEngine",
}
"""Our own engines, by name: module and class."""
_START_METHODS: Final = {"fork": "forked", "fresh": "fresh"}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        values: what the ranks returned, by rank.
        failures: one failure for each rank that failed.
        stopped: ranks whose processes the launcher ended.
        was_stopped: whether workers were ended because somebody asked the run to stop.
        was_asked: whether somebody asked the run to stop, where others than this process may have; None elsewhere.
        hang: a report of where each rank hung, if the run was ended for a hang; empty otherwise.
        cause: the failure that came first, if it was on another node; None otherwise.
        where: name of that node; empty if `cause` is None.
        error: what ended the run, if that was not a failure of a rank; None otherwise.
        ended: when, in seconds since the epoch; None where that is now.
    """

    values: Mapping[int, Any] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    stopped: frozenset[int] = frozenset()
    was_stopped: bool = False
    was_asked: bool | None = None
    hang: str = ""
    cause: Failure | None = None
    where: str = ""
    error: BaseException | None = None
    ended: float | None = None

    @property
    def is_bad(self) -> bool:
        """Whether the run failed, hung or was stopped: it has no values to return."""
        return bool(self.failures or self.was_stopped or self.hang or self.cause or self.error)

    def choose_value(self, returns: Returns) -> Any:
        """Return the value of the run.

        Args:
            returns: the argument of the launch.
        """
        if returns == "all":
            return [self.values.get(rank) for rank in sorted(self.values)]
        return self.values[min(self.values)] if returns == "first" else None


class Engine(ABC):
    """Starts the processes of a run and watches them to the end. Subclasses implement `run`.

    Attributes:
        name: its name in `notebook_launcher(engine=...)`.
        device_kind: kind of device that it runs on; None is the best kind that this machine has.
        has_workers: whether worker processes run the function. If False, this process runs it.
        on_this_node: whether the processes run on this machine. Then preflight counts its devices and resolves the
            start method.
        drives_nodes: whether one launch drives all nodes, and `num_nodes` says how many. Else each node has a launch of
            its own, and they meet.
        start_methods: start methods that the engine supports, without `auto`.
        refuses: arguments of a launch that the engine does not support, each with the reason as a clause. It may name
            `num_processes`, `num_nodes`, `max_restarts`, `block`, `on_hang`, `log_dir`, `address`, `tpu_mode` and
            `secret`.
            Without its reason here an argument reaches the engine, which then has to do what it says.
    """

    name: ClassVar[str]
    device_kind: ClassVar[devices.DeviceKind | None] = None
    has_workers: ClassVar[bool] = True
    on_this_node: ClassVar[bool] = True
    drives_nodes: ClassVar[bool] = False
    start_methods: ClassVar[tuple[StartMethod, ...]] = ("fork", "fresh")
    refuses: ClassVar[Mapping[str, str]] = {}

    def count(self, options: Mapping[str, Any], kind: devices.DeviceKind) -> int:
        """Return the number of processes for a launch without `num_processes`. By default one for each device.

        Args:
            options: arguments of `notebook_launcher` by name.
            kind: kind of device that the processes compute on.

        Raises:
            LaunchError: the number cannot be found out, for example because the engine's cluster does not answer.
        """
        return devices.count_usable(kind, options["environment"])

    def problems(self, job: Job) -> Sequence[str]:
        """Return why this engine cannot run a job. Preflight calls it before anything starts.

        Args:
            job: what is to run. Its start method is the user's choice.

        Returns:
            One sentence for each problem; empty if there is none.
        """
        return ()

    def preload(self, job: Job, start_method: StartMethod) -> bool:
        """Import libraries in this process, so that forked workers need not import them.

        Args:
            job: what is to run. Its start method is the user's choice.
            start_method: how its workers will start: `fork` or `fresh`.

        Returns:
            Whether anything was imported.
        """
        return False

    def worker_setup(self, job: Job) -> Callable[[], None] | None:
        """Return a function that each worker calls before the function of the job.

        Args:
            job: what is to run.

        Returns:
            A function of an importable module, without arguments; None for nothing.
        """
        return None

    def remark(self, job: Job) -> str:
        """Return what `announce` adds to its line.

        Args:
            job: what is to run, its start method resolved.

        Returns:
            A clause; empty for nothing.
        """
        return ""

    def make_session_group(self, job: Job, attempt: Attempt) -> WorkerGroup[Any] | None:
        """Return the workers of a session, not started yet; None where they are processes of this machine.

        Args:
            job: its `serve` is what they run.
            attempt: the job, and the ways to the session.

        Raises:
            LaunchError: they cannot start.
        """
        return None

    def outlives(self, job: Job) -> bool:
        """Return whether a run goes on where this process ends, or watches it no more: what interrupts it, leaves it.

        Args:
            job: what runs.
        """
        return bool(job.options.get("detach"))

    def find_left(self, job: Job) -> Job:
        """Return the job for watching a left run again; for engines whose runs outlive this process.

        Args:
            job: what was launched.

        Raises:
            LaunchError: nothing is known of it any more.
        """
        raise NotImplementedError

    def describe_place(self) -> str:
        """Return where the run of this engine is, such as `job 12`; empty where that goes without saying."""
        return ""

    def describe_interrupt(self, job: Job, record: RunRecord) -> str:
        """Return what has become of a run whose cell was interrupted.

        Args:
            job: what ran.
            record: of the run.
        """
        has_begun = record.restarts > 0 or any(rank >= 0 for rank in record.phases)
        return f"{job.name}: " + ("all workers have ended" if has_begun else "no worker was started yet")

    @abstractmethod
    def run(self, job: Job, record: RunRecord, deliver: Deliver, control: Control) -> Outcome:
        """Run the job to its end.

        An engine whose workers are a `WorkerGroup` is an `attempts.GroupEngine`, which writes this method.

        Args:
            job: what to run.
            record: holds all events that were delivered so far.
            deliver: takes the events. The first one announces the run; see `announce`. By then the engine must have
                copied the function and its arguments, because the notebook goes on and may change them. Afterwards the
                engine calls it several times a second, even without events.
            control: says whether somebody asked the run to stop.

        Returns:
            The values by rank, or how the run failed or was stopped.

        Raises:
            LaunchError, ShipError: the processes cannot start.
            KeyboardInterrupt: the user interrupted the run. All workers have ended.
        """

    def announce(self, job: Job) -> Phase:
        """Return the event that announces a run, such as `Launching train on 2 CUDA processes (forked).`

        Args:
            job: what is to run, its start method resolved.
        """
        kind, count, place = job.device_kind, job.local_world_size, job.rendezvous
        what = f"{count} {kind.label} process" if count == 1 else f"{count} {kind.label} processes"
        how = f" ({_START_METHODS[job.start_method]})" if job.distributed else ", this one"
        node = f", node {place.node_rank} of {place.num_nodes}" if place.num_nodes > 1 else ""
        if place.is_elastic:
            node = f", a node of {place.min_nodes} to {place.num_nodes}"
        remark = self.remark(job)
        reason = f": {remark}" if remark else ""
        text = "" if job.quiet else f"Launching {job.name} on {what}{how}{node}{reason}."
        return Phase(rank=-1, time=time.time(), name="starting", detail=text)


def names() -> list[str]:
    """Return the names of all engines, sorted: our own and those of installed packages."""
    return sorted({*BUILT_IN, *(entry.name for entry in metadata.entry_points(group=GROUP))})


def check_name(name: str) -> None:
    """Check that an engine has a name, without importing the engine.

    Args:
        name: as the user gave it.

    Raises:
        ValueError: no engine has this name.
    """
    if name not in names():
        known = [AUTO, *names()]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"engine={name!r}: choose among {', '.join(map(repr, known))}{hint}")


def find(name: str) -> Engine:
    """Return an engine by its name.

    Args:
        name: of one of our engines, or of one that an installed package has as an entry point.

    Raises:
        ValueError: no engine has this name, or it cannot be made. The message says why.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        make: Callable[[], Engine] = getattr(importlib.import_module(f".{module}", __package__), attribute)
        return make()
    check_name(name)
    offered = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    try:
        engine = offered[name].load()()
    except Exception as error:
        raise ValueError(f"engine={name!r}: {offered[name].value} cannot be used: {error!r}") from error
    if not isinstance(engine, Engine):
        raise ValueError(f"engine={name!r}: {offered[name].value} makes no Engine, but {engine!r}")
    return engine
