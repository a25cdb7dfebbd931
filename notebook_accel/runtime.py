"""The runtime of this process and its reporter to the notebook; only this module has globals that change."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from . import environ

if TYPE_CHECKING:  # a script that does without torch is not to wait for it
    import torch

    from .comm.base import Comm
    from .topology import Topology


class Loader(Protocol):
    """The attributes of a prepared data loader that say where it stands.

    Attributes:
        iteration: the epoch, from 0.
        batches_seen: batches of this epoch that were handed out.
        length: batches of an epoch, None where it is unknown.
    """

    iteration: int
    batches_seen: int
    length: int | None


class Iteration:
    """One iterator over a prepared loader.

    Attributes:
        is_last: whether the batch that it handed out last is the loader's last one.
        remainder: see `GradientFlags.remainder`.
        num_unique: samples of all processes in the batch handed out last that are no repeats; None where it is not
            known to have repeats.
        is_left: whether it was closed before its end.
        turn: number of its last turn; a turn is all batches that one iterator hands out without another between them.
            0 before the first one.
        previous: the turn before that.
        is_single: whether it has handed out one batch in this turn.
    """

    __slots__ = ("_loader", "is_last", "is_left", "is_single", "num_unique", "previous", "remainder", "turn")

    def __init__(self, loader: Loader) -> None:
        self._loader = weakref.ref(loader)
        self.is_last = False
        self.remainder = -1
        self.num_unique: int | None = None
        self.is_left = False
        self.turn = 0
        self.previous = 0
        self.is_single = True

    @property
    def loader(self) -> Any | None:
        """The loader, None where it no longer exists."""
        return self._loader()

    def alternates_with(self, other: Iteration) -> bool:
        """Return True if this iterator had the last turn and both hand out batches in turn, as those of a `zip` do."""
        return self.is_single and 0 < other.previous < self.previous < other.turn


class GradientFlags:
    """The state of gradient accumulation; the accelerator and the prepared loaders write it.

    Which loop the code is in follows from the iterator that handed out a batch last. What became of others does not
    matter: they may have been left, or be kept in variables.

    Attributes:
        sync_gradients: whether the next step of an optimizer is due.
        num_steps: batches per optimizer step.
        num_blocks: how many blocks of `accumulate` are open, one inside the other.
        adjust_scheduler: the user's choice; has no effect, schedules always step with the optimizer.
        sync_with_dataloader: whether a step follows the last batch of a loader.
        sync_each_batch: whether gradients are reduced for accumulated batches too, which saves memory.
        iterations: iterators over loaders that have not reached their ends, in the order in which they began.
        latest: of the iterator that handed out the last batch, also where it was left since; None outside of loops.
        steps: optimizer steps so far.
        xla_gradients_synced: whether gradients on XLA devices have been averaged since the last step.
    """

    __slots__ = (
        "_turn",
        "adjust_scheduler",
        "iterations",
        "latest",
        "num_blocks",
        "num_steps",
        "steps",
        "sync_each_batch",
        "sync_gradients",
        "sync_with_dataloader",
        "xla_gradients_synced",
    )

    def __init__(self) -> None:
        self.sync_gradients: bool = True
        self.num_steps: int = 1
        self.num_blocks: int = 0
        self.steps: int = 0
        self.adjust_scheduler: bool = True
        self.sync_with_dataloader: bool = True
        self.sync_each_batch: bool = False
        self.xla_gradients_synced: bool = False
        self.iterations: list[Iteration] = []
        self.latest: Iteration | None = None
        self._turn = 0

    def begin(self, loader: Loader) -> Iteration:
        """Return a new iteration of a loader, and forget those that were left.

        Args:
            loader: its iterator reads the first batch next.
        """
        iteration = Iteration(loader)
        self._enter(iteration)
        return iteration

    def give_turn(self, iteration: Iteration) -> None:
        """Note that an iterator hands out a batch, and another one did before: the code is in the loop over this one.

        Args:
            iteration: of the iterator.
        """
        self._turn += 1
        iteration.previous, iteration.turn, iteration.is_single = iteration.turn, self._turn, True
        self._enter(iteration)
        self.latest = iteration

    def end(self, iteration: Iteration) -> None:
        """Note that an iterator reached its end; the code has left all loops that began within it.

        Args:
            iteration: of the iterator.
        """
        if iteration in self.iterations:
            self.iterations = self.iterations[: self.iterations.index(iteration)]
        self.latest = max(self.iterations, key=_turn_of, default=None)

    def position(self) -> tuple[int, int, int | None]:
        """Return where the outermost loader that is being iterated stands; any thread may call it.

        Returns:
            The epoch (from 0), the batch (from 1; 0 without a loader), and the number of batches, None where it is
            unknown.
        """
        for iteration in self.iterations:
            loader = iteration.loader
            if loader is not None:
                return loader.iteration, loader.batches_seen, loader.length
        return 0, 0, None

    def _enter(self, iteration: Iteration) -> None:
        kept = [other for other in self._alive() if not other.is_left]
        self.iterations = kept if iteration in kept else [*kept, iteration]

    def _alive(self) -> list[Iteration]:
        return [iteration for iteration in self.iterations if iteration.loader is not None]

    @property
    def current(self) -> Iteration | None:
        """The iteration of the loop that the code is in, None without one.

        Where all loops were left it is the latest of these, until another begins.
        """
        if len(self.iterations) == 1 and self.iterations[0].loader is not None:  # as in most loops
            return self.iterations[0]
        alive = self._alive()
        live = [other for other in alive if not other.is_left]
        return max(live or alive, key=_turn_of, default=None)

    @property
    def active(self) -> Any | None:
        """The loader of the loop that the code is in, None without one."""
        return None if (current := self.current) is None else current.loader

    @property
    def end_of_dataloader(self) -> bool:
        """True while the loop works on its last batch: that of the active loader, or of one zipped with it."""
        current = self.current
        if current is None or current.is_last:
            return current is not None
        return len(self.iterations) > 1 and any(
            other.is_last and current.alternates_with(other) for other in self.iterations if not other.is_left
        )

    @property
    def remainder(self) -> int:
        """Number of samples in the last batch of all processes without duplicates; -1 without an active loader."""
        current = self.current
        return -1 if current is None else current.remainder


def _turn_of(iteration: Iteration) -> int:
    return iteration.turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The choices of the user; a later choice that differs is an error.

    Attributes:
        mixed_precision: `no`, `bf16`, `fp16` or `fp8`.
        debug: whether collectives compare the inputs of all ranks first.
        cpu: whether an argument or the environment asked for the CPU.
        backend: of the process group; None in a single process.
        group_options: arguments that opened the process group.
        dynamo_plugin: how the first accelerator compiles models.
        distributed_type: name of the `DistributedType` of the last accelerator's strategy; None where it follows from
            the devices.
        shards_weights: whether a process holds only a part of each weight.
        fsdp_plugin: the last accelerator's.
        deepspeed_plugins: the last accelerator's `PluginSet`.
        parallelism_config: the last accelerator's.
    """

    mixed_precision: str = "no"
    debug: bool = False
    cpu: bool = False
    backend: str | None = None
    group_options: Mapping[str, Any] = field(default_factory=dict)
    dynamo_plugin: Any = None
    distributed_type: str | None = None
    shards_weights: bool = False
    fsdp_plugin: Any = None
    deepspeed_plugins: Any = None
    parallelism_config: Any = None


class Feed(Protocol):
    """Sends batches to a device, where that takes more than a copy."""

    def open(self) -> Callable[[Any], Any]:
        """Return a function that sends the batches of an epoch to the device, in order."""

    def mark(self) -> None:
        """Tell the feed that a batch was used."""


@dataclass(kw_only=True, slots=True)
class Runtime:
    """The place of this process in the run, its device, and its way to the other processes.

    Attributes:
        topology: rank, world size and nodes.
        device: where this process trains.
        comm: the collectives.
        settings: the user's choices.
        gradient: the state of gradient accumulation.
        accelerated: whether there is an `Accelerator`; the first one fixes the precision.
        feed: sends batches to the device; None where they are only copied.
        store: where ranks of several machines meet, if this process holds it; None otherwise.
        token: stands for this runtime where a reference would keep it alive.
    """

    topology: Topology
    device: torch.device
    comm: Comm
    settings: Settings = field(default_factory=Settings)
    gradient: GradientFlags = field(default_factory=GradientFlags)
    accelerated: bool = False
    feed: Feed | None = None
    store: Any = None
    token: object = field(default_factory=object, repr=False, compare=False)

    def __copy__(self) -> Runtime:
        return self

    def __deepcopy__(self, memo: Any) -> Runtime:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to the runtime of the process that unpickles it."""
        return require, (self.topology.world_size,)


@dataclass(eq=False, slots=True)
class Slot:
    """Holds the runtime of a process, or of a thread that is a rank.

    Attributes:
        runtime: None before the first `PartialState` or `Accelerator`.
        waiting: the state of gradient accumulation for the first runtime; None where nobody asked for it yet.
        variables: what an accelerator has set in the environment for libraries that look there; it goes with the
            accelerator's settings.
    """

    runtime: Runtime | None = None
    waiting: GradientFlags | None = None
    variables: tuple[str, ...] = ()

    @property
    def gradient(self) -> GradientFlags | None:
        """The state of gradient accumulation, None where there is none."""
        return self.waiting if self.runtime is None else self.runtime.gradient

    @gradient.setter
    def gradient(self, flags: GradientFlags | None) -> None:
        if self.runtime is None:
            self.waiting = flags
        else:
            self.runtime.gradient = GradientFlags() if flags is None else flags

    def drop_variables(self) -> None:
        """Take out of the environment what an accelerator has set there."""
        environ.drop(*self.variables)
        self.variables = ()

    def install(self, runtime: Runtime) -> None:
        """Hold another runtime; it takes over the state of gradient accumulation that waits for one.

        Args:
            runtime: the new one.
        """
        if self.waiting is not None:
            runtime.gradient, self.waiting = self.waiting, None
        self.runtime = runtime


class Reporter(Protocol):
    """Reports to the notebook from inside a launched function."""

    def takes_metrics(self, names: Iterable[str]) -> bool:
        """Return whether one more step's numbers are kept; asked before a look at values, which may wait for a GPU."""

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Report the numbers of one step.

        Args:
            values: numbers by name.
            step: number of the step, None where it has none.
        """

    def flush(self) -> None:
        """Wait until the notebook has the output of this process, but not for long."""

    def note_save(self, name: str, folders: Sequence[str], is_over: bool) -> None:
        """Report that a checkpoint is being written in the background, in these folders; or that this is over."""

    def should_stop(self) -> bool:
        """Return whether the run is to stop. All ranks of the launcher get True at the same call."""


_slot = Slot()
_thread = threading.local()
_reporter: Reporter | None = None
_runs: list[Any] = []
_sessions: list[Any] = []
_agents: list[Any] = []
_connections: list[Any] = []
_owners: weakref.WeakSet[Any] = weakref.WeakSet()
_stores: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def is_accelerated() -> bool:
    """Return whether there is an accelerator."""
    return (own := current()) is not None and own.accelerated


def slot() -> Slot:
    """Return the slot of this thread if it is a rank, else that of the process."""
    own: Slot | None = getattr(_thread, "slot", None)
    return _slot if own is None else own


def values_of_thread() -> dict[Any, Any] | None:
    """Return what a thread that is a rank keeps for itself, None in other threads; changes of the dict count."""
    return getattr(_thread, "values", None)


def current() -> Runtime | None:
    """Return the runtime of this thread if it is a rank, else the process's; None before a `PartialState` is made."""
    return slot().runtime


def enter(other: Slot) -> None:
    """Replace the slot of this thread if it is a rank, else that of the process.

    Args:
        other: a new one, or one that `slot` returned in the same thread.
    """
    global _slot
    if getattr(_thread, "slot", None) is None:
        _slot = other
    else:
        _thread.slot = other


def require(world_size: int) -> Runtime:
    """Return the runtime of this thread or process for what was pickled.

    Args:
        world_size: number of processes of the run in which that was.

    Raises:
        RuntimeError: there is no runtime, or its run has another number of processes.
    """
    own = current()
    if own is None:
        raise RuntimeError("there is no runtime in this process: make an Accelerator or PartialState first")
    if own.topology.world_size != world_size:
        raise RuntimeError(
            f"this was pickled in a run of {world_size} processes, not {own.topology.world_size}"
        )
    return own


def install(runtime: Runtime, *, for_thread: bool = False) -> None:
    """Set the runtime of this thread if it is a rank, else that of the process.

    Args:
        runtime: the new one.
        for_thread: this thread is a rank from now on.
    """
    if for_thread and getattr(_thread, "slot", None) is None:
        _thread.slot, _thread.values = Slot(waiting=copy.copy(_slot.waiting)), {}
    slot().install(runtime)


def reset() -> None:
    """Remove the runtime. Its process group stays open, see `Comm.close`."""
    own = slot()
    own.drop_variables()
    own.runtime = own.waiting = None


def forget() -> None:
    """Drop the runtimes that a fork copied from its parent, also that of the thread that forked."""
    global _slot
    _slot, _thread.slot, _thread.values = Slot(), None, None


def reporter() -> Reporter | None:
    """Return the reporter; None in a process that no notebook launched."""
    return _reporter


def runs() -> list[Any]:
    """Return the launches of this process; changes of the list count."""
    return _runs


def sessions() -> list[Any]:
    """Return weak references to the sessions of this process, oldest first; changes of the list count."""
    return _sessions


def agents() -> list[Any]:
    """Return the agent of this process, in a list of one or none. Changes of the list count."""
    return _agents


def connections() -> list[Any]:
    """Return what holds this process's connections to hosts, in a list of one or none. Changes of the list count."""
    return _connections


def owners() -> weakref.WeakSet[Any]:
    """Return what has descriptors that no fork keeps; see `launch.descriptors`. Changes of the set count."""
    return _owners


def stores() -> weakref.WeakKeyDictionary[Any, int]:
    """Return torch's stores, and by what descriptor each listens, which no fork keeps. Changes of the dict count."""
    return _stores


def set_reporter(reporter: Reporter | None) -> None:
    """Set the reporter; `reset` does not remove it, because it belongs to the launch.

    Args:
        reporter: the new one, None for none.
    """
    global _reporter
    _reporter = reporter
