"""Copies and pickles of an accelerator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import detect, precision, runtime
from ..compilation import TorchDynamoPlugin
from ..gradient_state import AccumulationChoices
from ..state import AcceleratorState
from .base import Shared


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run in which an accelerator was pickled.

    Attributes:
        world_size: number of its processes.
        device_type: where they train.
        cpu: whether an argument or the environment asked for the CPU.
        mixed_precision: `no`, `bf16`, `fp16` or `fp8`.
        accumulation: choices of gradient accumulation by name.
        dynamo_plugin: how the accelerator compiles models.
    """

    world_size: int
    device_type: str
    cpu: bool
    mixed_precision: str
    accumulation: dict[str, Any]
    dynamo_plugin: TorchDynamoPlugin


class PicklePart(Shared):
    """Copies refer to the same run; what is unpickled belongs to the run of the process where that happens.

    A pickle has copies of all that was prepared. Trackers and hooks have to allow it.
    """

    def __copy__(self) -> Any:
        made = object.__new__(type(self))
        vars(made).update(vars(self))
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
            world_size=own.topology.world_size,
            device_type=own.device.type,
            cpu=own.settings.cpu,
            mixed_precision=self._precision.mode,
            accumulation=dict(AccumulationChoices(own.gradient)),
            dynamo_plugin=self._dynamo,
        )
        # a checkpoint that is being written is this one's own
        return _make_empty, (type(self), origin), {**vars(self), "_writer": None}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


def _make_empty(kind: type[PicklePart], origin: Origin) -> PicklePart:
    """Return an accelerator without attributes, in a run as it was: in the one that there is, else in a new one.

    Raises:
        ValueError: the run is another.
    """
    own = runtime.current() or detect.ensure(origin.cpu)
    if own.topology.world_size != origin.world_size:
        raise ValueError(
            f"this Accelerator was pickled in a run of {_count(origin.world_size)}, and this run has "
            f"{own.topology.world_size}: make a new one, and load what save_state saved"
        )
    if own.device.type != origin.device_type:
        raise ValueError(
            f"this Accelerator was pickled where it trains on {origin.device_type}, and this process trains on "
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


def _count(world_size: int) -> str:
    return "1 process" if world_size == 1 else f"{world_size} processes"
