"""Accelerator: one object that makes a training loop run on any number of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from .. import compilation, detect, devices, environ, precision, probes, runtime, state_views
from ..caller import find_line
from ..compilation import TorchDynamoPlugin
from ..fp8 import AORecipeKwargs, FP8BackendType
from ..fsdp import FullyShardedDataParallelPlugin
from ..gradient_state import GradientState
from ..handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from ..parallelism import ParallelismConfig, TorchTensorParallelPlugin
from ..precision import Precision
from ..runtime import Runtime
from ..seeding import RNGType, list_sources
from ..state import AcceleratorState
from ..strategies.base import Plugins
from . import strategy_table, trainer
from .arguments import UNSET, check_arguments, check_steps
from .collect import CollectPart
from .handlers import HandlerPart
from .pickling import PicklePart
from .prepare import PreparePart
from .process import ProcessPart
from .profiling import ProfilePart
from .save import SavePart
from .track import TrackPart
from .train import TrainPart

if TYPE_CHECKING:  # trackers are imported by those who track
    from ..tracking import GeneralTracker

_HANDLERS: Final = (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)


class Accelerator(
    PreparePart,
    TrainPart,
    CollectPart,
    SavePart,
    TrackPart,
    ProcessPart,
    ProfilePart,
    HandlerPart,
    PicklePart,
):
    """Prepares models, optimizers, data loaders and schedulers for the processes of a run.

    On XLA devices each process has one of them. With NOTEBOOK_ACCEL_TPU_MODE=spmd, or after `torch_xla`'s `use_spmd`,
    one process trains on all: it counts as one process, the batches of loaders are those of all devices together,
    and each device computes with its part of the rows.

    Args:
        device_placement: move models and batches to the device.
        split_batches: set it in `dataloader_config`; kept for older code.
        mixed_precision: `no`, `bf16`, `fp16` or `fp8`; by default that of ACCELERATE_MIXED_PRECISION, else `no`.
        gradient_accumulation_steps: batches per optimizer step; ACCELERATE_GRADIENT_ACCUMULATION_STEPS overrides it.
        cpu: use no accelerator device.
        dataloader_config: how data loaders are prepared.
        fsdp_plugin: shard models by FSDP; by default where ACCELERATE_USE_FSDP, or an earlier accelerator, says so.
        torch_tp_plugin: what `ParallelismConfig(tp_size=...)` is, in older code.
        rng_types: generators (`torch`, `cuda`, `generator`) that every epoch starts with as rank 0 has them; by
            default `generator`, that of the loader's sampler.
        log_with: trackers: names, `all`, `LoggerType` members, instances of `GeneralTracker`, or a list of them.
        project_dir: folder for what the run writes.
        project_config: that folder and more about checkpoints.
        gradient_accumulation_plugin: more about accumulation, instead of `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: step schedulers only when their optimizers step.
        deepspeed_plugin: how DeepSpeed trains; a dict of such by name for several models, of which
            `AcceleratorState().select_deepspeed_plugin` chooses. By default what the environment says.
        deepspeed_plugins: the same.
        kwargs_handlers: at most one each of `AORecipeKwargs`, `AutocastKwargs`, `DistributedDataParallelKwargs`,
            `GradScalerKwargs`, `InitProcessGroupKwargs` and `ProfileKwargs`.
        dynamo_backend: compile prepared models with this backend of `torch.compile`.
        dynamo_plugin: more about compiling, instead of `dynamo_backend`; by default that of the first accelerator.
        parallelism_config: several kinds of parallelism together; by default as for `fsdp_plugin`, by
            ACCELERATE_USE_PARALLELISM_CONFIG.

    Raises:
        ValueError: arguments contradict each other, the device, or an earlier Accelerator or PartialState; a
            tracker is unknown; the sizes of `parallelism_config` are not those of the run.
        ImportError: a tracker's library is not installed.
        NotImplementedError: an argument is not supported: any of the names not listed above.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: Any = UNSET,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: TorchTensorParallelPlugin | None = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        check_arguments(locals())
        installed = runtime.current()
        earlier = installed.settings if installed is not None and installed.accelerated else None
        handlers = _sort_handlers(kwargs_handlers or ())
        plugins = strategy_table.resolve_plugins(
            settings=earlier,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            ddp=handlers.get(DistributedDataParallelKwargs),
        )
        self.dataloader_config = _resolve_loader_config(dataloader_config, split_batches)
        self.rng_types = _check_rng_types(rng_types)
        self.project_configuration = _resolve_project(project_config, project_dir)
        self.log_with = _choose_trackers(log_with, self.project_configuration)
        accumulation = _resolve_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        accumulation, mixed_precision = strategy_table.resolve_arguments(
            plugins, accumulation, mixed_precision
        )
        dynamo = None
        if dynamo_backend or dynamo_plugin:
            dynamo = compilation.choose(dynamo_backend, dynamo_plugin)
        group = _resolve_group_options(handlers, plugins, cpu)
        check = functools.partial(
            strategy_table.check, plugins=plugins, has_recipe=AORecipeKwargs in handlers
        )
        self._runtime = _resolve_runtime(installed, mixed_precision, cpu, group, check)
        settings = self._runtime.settings
        self._dynamo = dynamo or settings.dynamo_plugin or compilation.choose(None, None)
        self.state = state_views.attach(object.__new__(AcceleratorState))  # as __init__ would
        self.gradient_state = _start_accumulation(self._runtime, accumulation)
        self.device_placement = bool(device_placement)
        self.step_scheduler_with_optimizer = bool(step_scheduler_with_optimizer)
        self.profile_handler, self._autocast_handler = map(handlers.get, (ProfileKwargs, AutocastKwargs))
        self.scaler_handler, self.init_handler = map(handlers.get, (GradScalerKwargs, InitProcessGroupKwargs))
        self._precision = _make_precision(self._runtime, handlers, plugins)
        self._strategy, kind = strategy_table.choose(self._runtime, self._precision, plugins)
        self._ddp_handler, self._recipe = plugins.ddp, self._precision.recipe
        self._runtime.settings = dataclasses.replace(
            settings,
            dynamo_plugin=settings.dynamo_plugin or self._dynamo,
            distributed_type=kind,
            shards_weights=self._strategy.shards_weights,
            fsdp_plugin=plugins.fsdp,
            deepspeed_plugins=plugins.deepspeed,
            parallelism_config=plugins.parallelism,
        )
        self._step, self._counted, self._counts = 0, None, {None: 0}
        self._made_at = find_line(probes.CELL)
        self.trackers, self._unfinished = [], []
        self._models, self._optimizers, self._schedulers, self._dataloaders = [], [], [], []
        self._custom_objects = []
        # handles refer to them weakly, which a dict does not allow
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._writer, self.flag_tensor = None, None
        if trainer.LIBRARY in sys.modules:
            trainer.join()

    def __repr__(self) -> str:
        return (
            f"Accelerator(rank {self.process_index} of {self.num_processes} on {self.device}, "
            f"mixed_precision={self.mixed_precision!r})"
        )

    @property
    def mixed_precision(self) -> str:
        """`no`, `bf16`, `fp16` or `fp8`."""
        return self._precision.mode

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in float8; NO unless the precision is `fp8`."""
        return FP8BackendType.AO if self._precision.mode == "fp8" else FP8BackendType.NO

    @property
    def native_amp(self) -> bool:
        """True if models run under `torch.autocast`."""
        return self._precision.is_mixed

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of `fp16`, None otherwise."""
        return self._precision.scaler

    @property
    def split_batches(self) -> bool:
        """True if loaders split each batch over the processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads for all."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if samples are repeated so that all processes get equal batches."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config = dataclasses.replace(self.dataloader_config, even_batches=value)

    @property
    def use_seedable_sampler(self) -> bool:
        """True if loaders shuffle by seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """True if copies from pinned memory overlap with computation."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if loaders are torchdata's, which have a state."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def is_fsdp2(self) -> bool:
        """True if weights are sharded by fully_shard."""
        return self._strategy.shards_weights

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if several kinds of parallelism are combined."""
        return self._runtime.settings.parallelism_config is not None

    @property
    def parallelism_config(self) -> Any:
        """The sizes of each kind of parallelism, None where they are not combined."""
        return self._runtime.settings.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The device mesh of a run with several kinds of parallelism, None otherwise."""
        return self._strategy.mesh

    @property
    def deepspeed_plugin(self) -> Any:
        """The selected plugin of DeepSpeed, None where that does not train."""
        return self.state.deepspeed_plugin

    @property
    def should_save_model(self) -> bool:
        """True in the process that writes the model."""
        return self.is_main_process

    def end_training(self) -> None:
        """Wait for a checkpoint that is being written, finish the trackers, close the group that this package opened.

        In a launched worker its launcher closes the group.
        """
        with contextlib.ExitStack() as stack:
            if not self.state.fork_launched:
                stack.callback(self._runtime.comm.close)
            stack.callback(self._strategy.close)
            stack.callback(self._finish_trackers)
            self._wait_for_writer()


def _resolve_loader_config(
    config: DataLoaderConfiguration | None, split_batches: Any
) -> DataLoaderConfiguration:
    if split_batches is UNSET:
        return config or DataLoaderConfiguration()
    if config is not None:
        raise ValueError(
            "split_batches and dataloader_config were both given: set split_batches in the latter"
        )
    return DataLoaderConfiguration(split_batches=bool(split_batches))


def _check_rng_types(rng_types: Sequence[str | RNGType] | None) -> list[str]:
    if rng_types is None:
        return ["generator"]
    chosen = [str(kind) for kind in rng_types]
    if unknown := [kind for kind in chosen if kind not in list_sources()]:
        raise ValueError(f"rng_types {unknown} are unknown, choose among {', '.join(list_sources())}")
    return chosen


def _resolve_project(
    config: ProjectConfiguration | None, project_dir: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    if config is None:
        return ProjectConfiguration(project_dir=project_dir)
    if project_dir is not None and config.project_dir is None:
        config.set_directories(project_dir)
    return config


def _choose_trackers(log_with: Any, project: ProjectConfiguration) -> list[str | GeneralTracker]:
    if log_with is None:
        return []
    from ..tracking import choose_trackers

    return choose_trackers(log_with, project.logging_dir)


def _sort_handlers(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    found: dict[type, Any] = {}
    for handler in handlers:
        kind = next((kind for kind in _HANDLERS if isinstance(handler, kind)), None)
        if kind is None:
            raise ValueError(
                f"kwargs_handlers takes {', '.join(kind.__name__ for kind in _HANDLERS)}, not {handler!r}"
            )
        if kind in found:
            raise ValueError(f"kwargs_handlers holds more than one {kind.__name__}")
        found[kind] = handler
    return found


def _resolve_accumulation(
    steps: int, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    if plugin is not None and steps != 1:
        raise ValueError(
            "gradient_accumulation_steps and gradient_accumulation_plugin were both given: set num_steps in the latter"
        )
    if plugin is not None:
        return plugin
    name = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if environ.get(name) not in (None, "auto"):  # a word for DeepSpeed: the argument counts
        number = environ.integer(name, steps)
        check_steps(name, number)
        return GradientAccumulationPlugin(num_steps=number)
    return GradientAccumulationPlugin(num_steps=steps)


def _start_accumulation(own: Runtime, plugin: GradientAccumulationPlugin) -> GradientState:
    """Set all choices; what the plugin does not say gets its default."""
    for item in dataclasses.fields(GradientAccumulationPlugin):
        value = getattr(plugin, item.name)
        setattr(own.gradient, item.name, 1 if value is None else value)
    return GradientState.__new__(GradientState)  # __init__ would do the same


def _resolve_group_options(handlers: dict[type, Any], plugins: Plugins, cpu: bool) -> dict[str, Any]:
    group: InitProcessGroupKwargs | None = handlers.get(InitProcessGroupKwargs)
    options = {} if group is None else group.to_kwargs()
    if plugins.fsdp is not None and plugins.fsdp.offloads:  # gradients are on the CPU, and are added up there
        options = devices.with_cpu_collectives(options, cpu or None)
    return options


def _resolve_runtime(
    installed: Runtime | None,
    mixed_precision: str | None,
    cpu: bool,
    group: dict[str, Any],
    check: Callable[[Runtime, str], None],
) -> Runtime:
    """Return the runtime, with the precision that the first accelerator asks for; ValueError if a later one differs.

    `check` is called before the runtime gets its precision.
    """
    if installed is None or cpu or group:  # else there is nothing to find out, nor to compare
        installed = detect.ensure(cpu, **group)
    if not installed.accelerated:
        mode = precision.resolve(mixed_precision, installed.device)
        check(installed, mode)
        installed.settings = dataclasses.replace(installed.settings, mixed_precision=mode)
        installed.accelerated = True
        return installed
    if mixed_precision is not None:
        AcceleratorState(mixed_precision=str(mixed_precision))
    check(installed, installed.settings.mixed_precision)
    return installed


def _make_precision(installed: Runtime, handlers: dict[type, Any], plugins: Plugins) -> Precision:
    mode = installed.settings.mixed_precision
    return Precision(
        mode,
        installed.device,
        autocast=handlers.get(AutocastKwargs),
        scaling=handlers.get(GradScalerKwargs),
        recipe=handlers.get(AORecipeKwargs),
        is_external=plugins.deepspeed is not None,
    )
