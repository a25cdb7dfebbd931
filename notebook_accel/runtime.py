"""The only module with globals that change: the runtime of this process, and its way to the notebook."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .comm.base import Comm
from .topology import Topology


class Loader(Protocol):
    """What gradient accumulation reads of a prepared data loader."""

    end_of_dataloader: bool
    remainder: int
    iteration: int
    batches_seen: int
    length: int | None


class GradientFlags:
    """Where gradient accumulation stands; the accelerator writes it, loaders push themselves while iterated.

    Attributes:
        sync_gradients: True when the next optimizer step is to happen.
        num_steps: batches per optimizer step.
        adjust_scheduler: what the user asked for; schedules step with the optimizer in either case.
        sync_with_dataloader: True makes the last batch of a loader a step.
        sync_each_batch: True reduces gradients on accumulated batches too, which saves memory.
        loaders: weak references to the loaders that are being iterated, innermost last.
        steps: optimizer steps so far.
        xla_gradients_synced: on XLA devices, gradients were averaged before the step.
    """

    __slots__ = (
        "adjust_scheduler",
        "loaders",
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
        self.steps: int = 0
        self.adjust_scheduler: bool = True
        self.sync_with_dataloader: bool = True
        self.sync_each_batch: bool = False
        self.xla_gradients_synced: bool = False
        self.loaders: list[weakref.ref[Any]] = []

    def begin(self, loader: Loader) -> None:
        """Note that the iteration of a loader starts; entries of dead loaders go."""
        self.loaders = [*self._alive(), weakref.ref(loader)]

    def end(self, loader: Loader) -> None:
        """Note that the iteration of a loader ended; its innermost entry goes, and entries of dead loaders."""
        for position in range(len(self.loaders) - 1, -1, -1):
            if self.loaders[position]() is loader:
                del self.loaders[position]
                break
        self.loaders = self._alive()

    def position(self) -> tuple[int, int, int | None]:
        """Return epoch, batch (from 1) and length of the outermost loader that is being iterated, for any thread.

        Without one the batch is 0; the length is None where nobody knows it.
        """
        for reference in list(self.loaders):
            loader = reference()
            if loader is not None:
                return loader.iteration, loader.batches_seen, loader.length
        return 0, 0, None

    def _alive(self) -> list[weakref.ref[Any]]:
        return [reference for reference in self.loaders if reference() is not None]

    @property
    def active(self) -> Any | None:
        """The innermost loader that is being iterated."""
        while self.loaders:
            loader = self.loaders[-1]()
            if loader is not None:
                return loader
            self.loaders.pop()
        return None

    @property
    def end_of_dataloader(self) -> bool:
        """True while the active loader hands out its last batch; False without one."""
        loader = self.active
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples of the last global batch that are no duplicates; -1 without an active loader."""
        loader = self.active
        return -1 if loader is None else int(loader.remainder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the user asked for; a second request that differs is a conflict.

    Attributes:
        mixed_precision: `no`, `bf16`, `fp16` or `fp8`.
        debug: compare the inputs of all ranks before each collective.
        cpu: no accelerator device, asked for by argument or environment.
        backend: of the process group, None in a single process.
        group_options: what the process group was opened with.
        dynamo_plugin: what the first accelerator compiles with.
        distributed_type: what the last accelerator's way to train is called, None for what devices make of it.
        shards_weights: a process holds only a part of each weight.
        fsdp_plugin: the last accelerator's.
        deepspeed_plugins: the last accelerator's, by name.
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
    """The way of batches to a device that is more than a copy."""

    def open(self) -> Callable[[Any], Any]:
        """Return what sends the batches of an epoch to the device, in order."""

    def mark(self) -> None:
        """Note that a batch was used."""


@dataclass(kw_only=True, slots=True)
class Runtime:
    """What this process is to the run, and how it talks to the others.

    `accelerated` becomes True with the first `Accelerator`, which settles the precision. `feed` is None where
    batches are copied to the device.
    """

    topology: Topology
    device: torch.device
    comm: Comm
    settings: Settings = field(default_factory=Settings)
    gradient: GradientFlags = field(default_factory=GradientFlags)
    accelerated: bool = False
    feed: Feed | None = None


class Reporter(Protocol):
    """The way from a launched function to the notebook."""

    def metrics(self, values: Mapping[str, float], step: int | None) -> None:
        """Report numbers of one step."""

    def flush(self) -> None:
        """Return when the notebook has this process's output, or after a moment."""

    def should_stop(self) -> bool:
        """Return whether the run was asked to stop: on all ranks of the node at the same question."""


_current: Runtime | None = None
_thread = threading.local()
_reporter: Reporter | None = None
_runs: list[Any] = []
_sessions: list[Any] = []


def current() -> Runtime | None:
    """Return the runtime of this thread where it has its own, else that of the process.

    None before the first `PartialState` or `Accelerator`.
    """
    own: Runtime | None = getattr(_thread, "runtime", None)
    return _current if own is None else own


def install(runtime: Runtime, *, for_thread: bool = False) -> None:
    """Make this the runtime of the process, or of this thread alone, where threads are what ranks are."""
    global _current
    if for_thread:
        _thread.runtime = runtime
    else:
        _current = runtime


def reset() -> None:
    """Forget the runtime; a process group that it opened stays open, see `Comm.close`."""
    global _current
    if getattr(_thread, "runtime", None) is not None:
        _thread.runtime = None
    else:
        _current = None


def reporter() -> Reporter | None:
    """Return the way to the notebook, None where none launched this process."""
    return _reporter


def runs() -> list[Any]:
    """Return the launches of this process that are known: the list itself."""
    return _runs


def sessions() -> list[Any]:
    """Return weak references to the sessions of this process, oldest first: the list itself."""
    return _sessions


def set_reporter(reporter: Reporter | None) -> None:
    """Make this the way to the notebook; `reset` leaves it, since it belongs to the launch."""
    global _reporter
    _reporter = reporter
