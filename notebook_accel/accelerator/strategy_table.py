"""Which strategy trains, by a table: what the accelerator was given, or the environment says, and its device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from .. import environ
from ..combinations import refuse
from ..deepspeed import resolve
from ..fsdp import FullyShardedDataParallelPlugin
from ..handlers import DistributedDataParallelKwargs, GradientAccumulationPlugin
from ..parallelism import ParallelismConfig
from ..precision import Precision
from ..runtime import Runtime, Settings
from ..strategies.base import Plugins, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A strategy, and when it is the one.

    Attributes:
        home: `module:Class`, named without `notebook_accel.`; imported when it is chosen.
        suits: whether it is meant.
        distributed_type: what the state calls such a run; None for what the number and kind of devices make of it.
    """

    home: str
    suits: Callable[[Runtime, Plugins], bool]
    distributed_type: str | None = None


def _is_sharded(runtime: Runtime, plugins: Plugins) -> bool:
    config = plugins.parallelism
    several = config is not None and (config.dp_shard_enabled or config.tp_enabled or config.cp_enabled)
    return several or (plugins.fsdp is not None and plugins.fsdp.strategy != "NO_SHARD")


ROWS: Final = (
    Row(
        home="deepspeed.strategy:DeepSpeed",
        suits=lambda runtime, plugins: plugins.deepspeed is not None,
        distributed_type="DEEPSPEED",
    ),
    Row(home="strategies.xla:XlaDevice", suits=lambda runtime, plugins: runtime.device.type == "xla"),
    Row(home="strategies.fsdp2:FullySharded", suits=_is_sharded, distributed_type="FSDP"),
    Row(home="strategies.ddp:DataParallel", suits=lambda runtime, plugins: runtime.topology.world_size > 1),
    Row(home="strategies.single:SingleDevice", suits=lambda runtime, plugins: True),
)
"""In the order in which they are asked."""


def resolve_plugins(
    *,
    settings: Settings | None,
    fsdp_plugin: Any,
    torch_tp_plugin: Any,
    megatron_lm_plugin: Any,
    parallelism_config: Any,
    deepspeed_plugin: Any,
    deepspeed_plugins: Any,
    ddp: DistributedDataParallelKwargs | None,
) -> Plugins:
    """Return the plugins of an accelerator: the arguments, else those of an earlier one, else the environment's.

    Args:
        settings: of the runtime of an earlier accelerator, None without.
        fsdp_plugin: as the accelerator got it, like the arguments after it; None where it was not given.
        torch_tp_plugin: see `fsdp_plugin`.
        megatron_lm_plugin: see `fsdp_plugin`.
        parallelism_config: see `fsdp_plugin`.
        deepspeed_plugin: see `fsdp_plugin`.
        deepspeed_plugins: see `fsdp_plugin`.
        ddp: the accelerator's handler of this class; each has its own.

    Raises:
        TypeError: a DeepSpeed plugin is of another class.
        ValueError: plugins contradict each other.
        NotImplementedError: something that is wanted cannot be had.
    """
    if megatron_lm_plugin is not None or environ.flag("ACCELERATE_USE_MEGATRON_LM"):
        raise NotImplementedError(
            "Megatron-LM is not supported: train with FullyShardedDataParallelPlugin and "
            "ParallelismConfig(tp_size=...), or choose another distributed_type"
        )
    if torch_tp_plugin is not None:
        if parallelism_config is not None:
            raise refuse("tp plugin, parallelism")
        parallelism_config = ParallelismConfig(tp_size=torch_tp_plugin.tp_size)
        parallelism_config.device_mesh = torch_tp_plugin.torch_device_mesh
    if settings is not None:
        fsdp_plugin = fsdp_plugin or settings.fsdp_plugin
        parallelism_config = parallelism_config or settings.parallelism_config
    if fsdp_plugin is None and environ.flag("ACCELERATE_USE_FSDP"):
        fsdp_plugin = FullyShardedDataParallelPlugin()
    if parallelism_config is None and environ.flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        parallelism_config = ParallelismConfig()
    before = None if settings is None else settings.deepspeed_plugins
    deepspeed = None
    if any(item is not None for item in (deepspeed_plugin, deepspeed_plugins, before)) or environ.flag(
        "ACCELERATE_USE_DEEPSPEED"
    ):
        deepspeed = resolve.resolve_plugins(deepspeed_plugin, deepspeed_plugins, before)
    plugins = Plugins(fsdp=fsdp_plugin, deepspeed=deepspeed, parallelism=parallelism_config, ddp=ddp)
    _check_together(plugins)
    return plugins


def _check_together(plugins: Plugins) -> None:
    plugin, config = plugins.fsdp, plugins.parallelism
    if config is not None and config.sp_enabled:  # Trainer has such a config together with DeepSpeed
        raise refuse("sequence parallel", config.equation())
    if plugins.deepspeed is not None and plugin is not None:
        raise refuse("deepspeed, fsdp")
    if plugins.deepspeed is not None and config is not None:
        raise refuse("deepspeed, parallelism")
    if plugin is not None and plugin.strategy == "NO_SHARD":
        asked = {
            "cpu_offload": plugin.offloads,
            "mixed_precision_policy": plugin.mixed_precision_policy is not None,
            "activation_checkpointing": plugin.activation_checkpointing,
            "ignored_modules": plugin.ignored_modules is not None,
        }
        if what := ", ".join(name for name, is_asked in asked.items() if is_asked):
            raise refuse("no shard, options", what)
        if config is not None and config.dp_shard_enabled:
            raise refuse("no shard, dp_shard", config.equation())


def resolve_arguments(
    plugins: Plugins, accumulation: GradientAccumulationPlugin, mixed_precision: str | None
) -> tuple[GradientAccumulationPlugin, str | None]:
    """Return how gradients accumulate and the precision, each from the arguments or from DeepSpeed's config.

    Args:
        plugins: of the accelerator.
        accumulation: what the accelerator was given.
        mixed_precision: the argument, None where it was not given.

    Raises:
        ValueError: DeepSpeed's config contradicts an argument.
    """
    if plugins.deepspeed is None:
        return accumulation, mixed_precision
    return (
        resolve.resolve_accumulation(plugins.deepspeed, accumulation),
        resolve.resolve_precision(plugins.deepspeed, mixed_precision),
    )


def check(runtime: Runtime, mode: str, *, plugins: Plugins, has_recipe: bool) -> None:
    """Check that what an accelerator is given can be had together; nothing has changed by then.

    Args:
        runtime: of the process.
        mode: the precision.
        plugins: what says how a model is spread over the processes.
        has_recipe: whether it is said how layers are converted to float8.

    Raises:
        ValueError: the plugins do not suit the run.
        NotImplementedError: something that is wanted cannot be had.
    """
    spread = plugins.fsdp is not None or plugins.parallelism is not None
    if spread and runtime.device.type == "xla":
        raise refuse("xla, sharded")
    if has_recipe and mode != "fp8":
        raise refuse("fp8 recipe, precision", repr(mode))
    if plugins.parallelism is not None:
        plugins.parallelism.check(runtime.topology.world_size)
    _class_of(_find_row(runtime, plugins)).check(runtime, mode, plugins)


def choose(runtime: Runtime, precision: Precision, plugins: Plugins) -> tuple[Strategy, str | None]:
    """Make the strategy of the first row that suits, after `check`.

    Args:
        runtime: of the process.
        precision: of the accelerator.
        plugins: what says how a model is spread over the processes.

    Returns:
        The strategy, and the name of the run's distributed type; None where the devices decide that.

    Raises:
        ValueError: the plugins do not suit the run.
    """
    row = _find_row(runtime, plugins)
    return _class_of(row).create(runtime, precision, plugins), row.distributed_type


def _find_row(runtime: Runtime, plugins: Plugins) -> Row:
    return next(row for row in ROWS if row.suits(runtime, plugins))


def _class_of(row: Row) -> type[Strategy]:
    module, _, name = row.home.partition(":")
    kind: type[Strategy] = getattr(importlib.import_module(f"notebook_accel.{module}"), name)
    return kind
