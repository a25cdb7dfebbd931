"""Copies and pickles of an accelerator."""

from __future__ import annotations

import copyreg
import dataclasses
import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch

from .. import detect, precision, runtime, topology
from ..comm import torch_dist
from ..comm.single import AbsentComm
from ..compilation import TorchDynamoPlugin
from ..gradient_state import AccumulationChoices
from ..runtime import Runtime, Settings
from ..state import AcceleratorState
from ..topology import Topology
from .base import Shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run in which an accelerator was pickled.

    Attributes:
        topology: the place of the process in it.
        device: where the process trains.
        cpu: whether an argument or the environment asked for the CPU.
        backend: of the process group; None in a single process.
        mixed_precision: `no`, `bf16`, `fp16` or `fp8`.
        accumulation: choices of gradient accumulation by name.
        dynamo_plugin: how the accelerator compiles models.
    """

    topology: Topology
    device: torch.device
    cpu: bool
    backend: str | None
    mixed_precision: str
    accumulation: dict[str, Any]
    dynamo_plugin: TorchDynamoPlugin


class PicklePart(Shared):
    """Copies refer to the same run; what is unpickled belongs to the run of the process where that happens.

    A pickle has copies of all that was prepared. Trackers and hooks have to allow it. A derived class may have a
    `__getstate__` and a `__setstate__`.
    """

    def __getstate__(self) -> Any:
        """Return the attributes, and with them those in slots where a derived class has such."""
        names: list[str] = copyreg._slotnames(type(self))  # type: ignore[attr-defined]
        slots = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return (dict(vars(self)), slots) if slots else dict(vars(self))

    def __copy__(self) -> Any:
        made: Any = object.__new__(type(self))
        state = self.__getstate__()
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return made
        named, slots = state if isinstance(state, tuple) else (state, {})
        vars(made).update(named)
        for name, value in slots.items():
            setattr(made, name, value)
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if reason := self._strategy.unpicklable:
            raise TypeError(
                f"an Accelerator that trains by {reason} cannot be pickled: save its state by save_state"
            )
        own = self._runtime
        origin = Origin(
            topology=own.topology,
            device=own.device,
            cpu=own.settings.cpu,
            backend=own.settings.backend,
            mixed_precision=self._precision.mode,
            accumulation=dict(AccumulationChoices(own.gradient)),
            dynamo_plugin=self._dynamo,
        )
        return _make_empty, (type(self), origin), self.__getstate__()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


def _make_empty(kind: type[PicklePart], origin: Origin) -> PicklePart:
    """Return an accelerator without attributes, in a run as it was: in the one that there is, else in a new one.

    Raises:
        ValueError: the run is another.
    """
    own = runtime.current()
    if own is None and torch_dist.group_exists():
        own = detect.ensure(origin.cpu)
    if own is None:
        own = _join(origin)
    _refuse_other_size(origin, own.topology.world_size)
    if own.device.type != origin.device.type:
        raise ValueError(
            f"this Accelerator was pickled where it trains on {origin.device.type}, and this process trains on "
            f"{own.device.type}: make a new one, and load what save_state saved"
        )
    if own.accelerated:
        AcceleratorState(mixed_precision=origin.mixed_precision)
        return object.__new__(kind)
    mode = precision.resolve(origin.mixed_precision, own.device)
    own.settings = dataclasses.replace(own.settings, mixed_precision=mode, dynamo_plugin=origin.dynamo_plugin)
    own.accelerated = True
    AccumulationChoices(own.gradient).replace(origin.accumulation)
    return object.__new__(kind)


def _join(origin: Origin) -> Runtime:
    """Return the runtime of a process that has none, nor a process group. No group is opened.

    A process that a rank started, such as a worker of its data loader, inherits the rank's variables, and the place in
    the group that they name is taken: the runtime says what the rank's says, and has no collectives.
    """
    ours, world_size = origin.topology, topology.from_environ().world_size
    if ours.world_size == 1 or (world_size == 1 and multiprocessing.parent_process() is None):
        _refuse_other_size(origin, world_size)
        return detect.ensure(origin.cpu)
    made = Runtime(
        topology=ours,
        device=origin.device,
        comm=AbsentComm(ours.rank, ours.world_size, origin.device),
        settings=Settings(cpu=origin.cpu, backend=origin.backend),
    )
    runtime.install(made)
    return made


def _refuse_other_size(origin: Origin, world_size: int) -> None:
    if world_size != origin.topology.world_size:
        raise ValueError(
            f"this Accelerator was pickled in a run of {detect.count_processes(origin.topology.world_size)}, and this "
            f"run has {world_size}: make a new one, and load what save_state saved"
        )
