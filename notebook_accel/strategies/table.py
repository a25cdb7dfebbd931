"""Which strategy trains, by a table: what the accelerator was given, or the environment says, and its device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from .. import environ
from ..handlers import DistributedDataParallelKwargs, GradientAccumulationPlugin
from ..precision import Precision
from ..runtime import Runtime, Settings
from ..zero import chosen
from .base import Plugins, Strategy

_LIBRARIES: Final = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "several kinds of parallelism",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A strategy, and when it is the one.

    Attributes:
        home: `module:Class`, below this package; imported when it is chosen.
        suits: whether it is meant.
        distributed_type: what the state calls such a run; None for what the number and kind of devices make of it.
    """

    home: str
    suits: Callable[[Runtime, Plugins], bool]
    distributed_type: str | None = None


ROWS: Final = (
    Row(
        home="deepspeed:DeepSpeed",
        suits=lambda runtime, plugins: plugins.deepspeed is not None,
        distributed_type="DEEPSPEED",
    ),
    Row(home="xla:XlaDevice", suits=lambda runtime, plugins: runtime.device.type == "xla"),
    Row(home="ddp:DataParallel", suits=lambda runtime, plugins: runtime.topology.world_size > 1),
    Row(home="single:SingleDevice", suits=lambda runtime, plugins: True),
)
"""In the order in which they are asked."""


def plugins_of(arguments: dict[str, Any], settings: Settings | None) -> Plugins:
    """Return the plugins of an accelerator.

    Args:
        arguments: of the accelerator; those that are None count as not given.
        settings: of a runtime whose plugins a later accelerator takes over where it is given none.

    Raises:
        NotImplementedError: something that is wanted cannot be had.
    """
    deepspeed = chosen.plugins(
        arguments["deepspeed_plugin"],
        arguments["deepspeed_plugins"],
        None if settings is None else settings.deepspeed_plugins,
    )
    given = [
        name for name, value in arguments.items() if value is not None and not name.startswith("deepspeed_")
    ]
    if given:
        raise NotImplementedError(f"Accelerator does not support {', '.join(given)} yet: leave it out")
    wanted = [library for name, library in _LIBRARIES.items() if environ.flag(name)]
    if wanted:  # rather than to train each with a whole copy
        raise NotImplementedError(
            f"this run is configured for {' and '.join(wanted)}, which Accelerator does not support yet: choose "
            "another distributed_type"
        )
    return Plugins(deepspeed=deepspeed)


def settle(
    plugins: Plugins, accumulation: GradientAccumulationPlugin, mixed_precision: str | None
) -> tuple[GradientAccumulationPlugin, str | None]:
    """Return accumulation and precision as asked for or as the plugins say; ValueError if these contradict it."""
    if plugins.deepspeed is None:
        return accumulation, mixed_precision
    return (
        chosen.settle_accumulation(plugins.deepspeed, accumulation),
        chosen.settle_precision(plugins.deepspeed, mixed_precision),
    )


def choose(
    runtime: Runtime, precision: Precision, plugins: Plugins, ddp: DistributedDataParallelKwargs | None
) -> tuple[Strategy, str | None]:
    """Return the strategy of the first row that suits, and what the state calls such a run."""
    row = next(row for row in ROWS if row.suits(runtime, plugins))
    module, _, name = row.home.partition(":")
    kind: type[Strategy] = getattr(importlib.import_module(f".{module}", __package__), name)
    return kind.made_for(runtime, precision, plugins, ddp), row.distributed_type
