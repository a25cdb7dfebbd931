"""Training by DeepSpeed: it makes an engine of each model with its optimizer, and ZeRO shards their state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ..checkpointing.manifest import Manifest
from ..checkpointing.parts import CollectiveFolder, Parts
from ..combinations import refuse
from ..nested import convert_to_fp32, recursively_apply
from ..precision import Precision
from ..runtime import Runtime
from ..strategies.base import Bundle, Plugins, Strategy, unwrap
from . import checkpoints, library
from .dummies import DummyOptim, DummyScheduler
from .fill import Facts, fill_config
from .pairs import Pairing, pair_models
from .plugin import DeepSpeedPlugin
from .plugin_set import PluginSet
from .released import ReleasedEngines, become
from .wrappers import DeepSpeedEngineWrapper, DeepSpeedOptimizerWrapper, DeepSpeedSchedulerWrapper

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DeepSpeed(Strategy):
    """Makes an engine of each model that has an optimizer, and under ZeRO 3 of every model."""

    owns_backward: ClassVar[bool] = True
    fills_dummies: ClassVar[bool] = True
    unpicklable: ClassVar[str] = "DeepSpeed"

    def __init__(self, runtime: Runtime, precision: Precision, plugins: PluginSet) -> None:
        self.runtime = runtime
        self.precision = precision
        self.plugins = plugins
        self._has_own_group = not torch.distributed.is_initialized()
        self._has_own_rank = library.set_local_rank()
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.library = library.load(runtime.device)
            for plugin in plugins.values():
                plugin._device = runtime.device
            if plugins.selected is None:
                plugins.select()
            undo.pop_all()
        self._made: list[Any] = []  # all engines; those below have optimizers
        self._released = ReleasedEngines()
        self._engines: list[DeepSpeedEngineWrapper] = []
        self._optimizers: list[DeepSpeedOptimizerWrapper] = []
        self._quiet = 0

    @classmethod
    def check(cls, runtime: Runtime, mode: str, plugins: Plugins) -> None:
        """Do nothing: the plugins were checked where they were resolved."""

    @classmethod
    def create(cls, runtime: Runtime, precision: Precision, plugins: Plugins) -> Strategy:
        strategy = cls(runtime, precision, plugins.deepspeed)
        if (
            precision.mode == "fp16"
            and not strategy.library.accelerator.get_accelerator().is_fp16_supported()
        ):
            strategy.close()
            raise refuse("deepspeed, fp16 of the device", runtime.device.type)
        return strategy

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """The selected plugin."""
        plugin = self.plugins.selected
        assert plugin is not None, "the constructor selects one"
        return plugin

    @property
    def saves_collectively(self) -> bool:
        return True

    def release(self) -> None:
        for engine in self._made:
            self._released.add(engine)
        self._made.clear()
        self._engines.clear()
        self._optimizers.clear()

    def close(self) -> None:
        if self._has_own_group and torch.distributed.is_initialized():
            self.library.comm.destroy_process_group()
            self._has_own_group = False
        if self._has_own_rank:
            library.drop_local_rank()

    def prepare(self, bundle: Bundle) -> Bundle:
        """Return the bundle with its models ready; after them come those of optimizers that were prepared alone."""
        bundle, before = self._released.complete(bundle)
        models: list[Any] = list(bundle.models)
        optimizers: list[Any] = list(bundle.optimizers)
        schedulers: list[Any] = list(bundle.schedulers)
        pairings = pair_models(bundle, self.plugin)
        # every config is checked before the first engine is made
        configs = [self._config(pairing, bundle) if pairing.needs_engine else None for pairing in pairings]
        engines = [*(None for _ in models[: len(models) - len(before)]), *before]
        for pairing, config, engine in zip(pairings, configs, engines, strict=True):
            if config is None:
                if bundle.placements[pairing.model]:
                    models[pairing.model].to(self.runtime.device)
                continue
            models[pairing.model], optimizer, scheduler = self._make_engine(pairing, bundle, config, engine)
            if pairing.optimizer is not None:
                optimizers[pairing.optimizer] = optimizer
            if pairing.scheduler is not None:
                made = DeepSpeedSchedulerWrapper(scheduler, optimizer, runtime=self.runtime)
                dummy = bundle.schedulers[pairing.scheduler]
                schedulers[pairing.scheduler] = made if engine is None else become(dummy, made)
        self._released.forget(bundle.models)
        return dataclasses.replace(
            bundle, models=tuple(models), optimizers=tuple(optimizers), schedulers=tuple(schedulers)
        )

    def _config(self, pairing: Pairing, bundle: Bundle) -> dict[str, Any]:
        topology = self.runtime.topology
        scheduler = None if pairing.scheduler is None else bundle.schedulers[pairing.scheduler]
        facts = Facts(
            mixed_precision=self.precision.mode,
            num_steps=self.runtime.gradient.num_steps,
            world_size=topology.world_size,
            batch_size=self._batch_size(bundle),
            step_shares=1 if bundle.split_batches else self.num_shares,
            on_cpu=self.runtime.device.type == "cpu",
            model=bundle.models[pairing.model],
            optimizer=None if pairing.optimizer is None else bundle.optimizers[pairing.optimizer],
            scheduler=scheduler if isinstance(scheduler, DummyScheduler) else None,
        )
        return fill_config(self.plugin, facts)

    def _batch_size(self, bundle: Bundle) -> int | None:
        sizes = [size for loader in bundle.loaders if (size := getattr(loader, "batch_size", None))]
        if bundle.split_batches:
            sizes = [max(1, size // self.runtime.topology.world_size) for size in sizes]
        if not sizes:
            return None
        return int(min(sizes) if self.plugin.is_train_batch_min else max(sizes))

    def _make_engine(
        self, pairing: Pairing, bundle: Bundle, config: dict[str, Any], before: Any
    ) -> tuple[Any, Any, Any]:
        """Return an engine, its optimizer and its scheduler; the engine is the one that was there before, if any."""
        model: Any = bundle.models[pairing.model]
        raw = None if pairing.optimizer is None else bundle.optimizers[pairing.optimizer]
        dummy = None if pairing.scheduler is None else bundle.schedulers[pairing.scheduler]
        arguments: dict[str, Any] = {"model": model, "config": config}
        if isinstance(raw, DummyOptim):
            arguments["model_parameters"] = raw.params
        elif raw is not None:
            arguments["optimizer"] = raw
        else:
            config.pop("optimizer", None)
            config.pop("scheduler", None)
        if dummy is not None and dummy.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = dummy.lr_scheduler_callable
        self.plugin.set_moe_leaf_modules(model)
        engine, optimizer, _, scheduler = self.library.initialize(**arguments)
        engine = engine if before is None else become(before, engine)
        self._made.append(engine)
        self._cast_inputs_and_outputs(engine)
        wrapper = DeepSpeedEngineWrapper(engine)
        if raw is None:
            return engine, None, None
        self._engines.append(wrapper)
        prepared = DeepSpeedOptimizerWrapper(
            optimizer, wrapper, None if isinstance(raw, DummyOptim) else raw, runtime=self.runtime
        )
        self._optimizers.append(prepared)
        if hasattr(optimizer, "register_grad_acc_post_hook"):  # also of a loss that belongs to several
            optimizer.register_grad_acc_post_hook(prepared.note_backward)
        return engine, prepared, scheduler

    def _cast_inputs_and_outputs(self, engine: Any) -> None:
        """Cast inputs to the precision of the engine, and outputs to float32."""
        dtype = _DTYPES.get(self.precision.mode)
        if dtype is None:
            return

        def lower(module: Any, args: Any, kwargs: Any) -> Any:
            return recursively_apply(_to(dtype), (args, kwargs), test_type=_is_float)

        engine.register_forward_pre_hook(lower, with_kwargs=True)
        engine.register_forward_hook(lambda module, args, output: convert_to_fp32(output))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward pass of a loss.

        Args:
            loss: of shape []; the output of one or several engines.
            kwargs: `retain_graph`.

        Raises:
            ValueError: no model has an optimizer; or there are several engines, and losses are scaled or the ZeRO stage
                is 0.
        """
        if not self._engines:
            raise ValueError("no model was prepared with an optimizer: prepare(model, optimizer) in one call")
        step_follows = self.runtime.gradient.sync_gradients and not self._quiet
        if len(self._engines) == 1:
            self._engines[0].backward(loss, sync_gradients=step_follows, **kwargs)
            self._optimizers[0].note_backward()
            return
        scaled = [engine for engine in self._engines if _needs_own_backward(engine.engine)]
        if scaled:
            raise refuse("deepspeed, losses", f"{len(self._engines)} models")
        with contextlib.ExitStack() as stack:
            for engine in self._engines:  # each finds its own part of the loss by itself
                engine.engine._scale_wrt_gas = False
                stack.enter_context(engine.accumulate(step_follows))
            loss.backward(**kwargs)

    @contextlib.contextmanager
    def _suppress_sync(self) -> Iterator[None]:
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which ZeRO 0 and 1 reduce no gradients; ZeRO 2 and 3 reduce them in any case."""
        return self._suppress_sync()

    def joinable(self, model: Any) -> Any:
        raise refuse("deepspeed, join")

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip the gradients in the next step. While gradients accumulate, clip nothing.

        Args:
            parameters: all trainable parameters of one or several prepared models.
            max_norm: limit of the total norm.
            norm_type: must be 2.

        Returns:
            The total norm of the gradients; while they accumulate, that of the last step.

        Raises:
            ValueError: another `norm_type`, only some parameters of a model, or none.
        """
        if norm_type != 2:
            raise refuse("deepspeed, norm", f"norm_type={norm_type}")
        wanted = {id(item) for item in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        meant = [optimizer for optimizer in self._optimizers if _is_wanted(optimizer, wanted)]
        if not meant:
            raise ValueError(
                "none of the parameters to clip belongs to a model that was prepared with an optimizer"
            )
        if self._quiet or not self.runtime.gradient.sync_gradients:
            norms = [optimizer.engine.get_global_grad_norm() or 0.0 for optimizer in meant]
            last: torch.Tensor = torch.linalg.vector_norm(torch.tensor(norms))
            return last
        engines = [optimizer.engine for optimizer in meant if optimizer.has_gradients]
        measured = [engine.gradient_norm().to(self.runtime.device) for engine in engines]
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(measured or [torch.zeros(())]))
        for engine, norm in zip(engines, measured, strict=True):
            share = float(norm / total) if len(engines) > 1 and total else 1.0
            engine.clip(max_norm * share, norm)
        return total

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        raise refuse("deepspeed, clip_grad_value_")

    def holds_part(self, model: torch.nn.Module) -> bool:
        return checkpoints.is_sharded(unwrap(model, keep_torch_compile=False))

    def state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """Return the whole state of the user's model in the first process of each node, {} in the others."""
        inner = unwrap(model, keep_torch_compile=False)
        if not checkpoints.is_sharded(inner):
            return super().state_dict(model)
        return checkpoints.gather_state(self.library, inner, keep=self.runtime.topology.is_local_main)

    def weights(self, model: torch.nn.Module) -> dict[str, Any]:
        return {} if checkpoints.is_engine(model) else self.state_dict(model)

    def collective_folders(self, parts: Parts, weights: list[dict[str, Any]]) -> list[CollectiveFolder]:
        if not parts.models:
            return []
        return [checkpoints.EngineFiles(parts.models, weights, self.runtime.topology.rank)]

    def load_collective_folders(self, listed: Manifest, parts: Parts) -> list[Callable[[], None]] | None:
        engines: Sequence[Any] = [self._engine_of(model) for model in parts.models]
        if not any(map(checkpoints.is_engine, engines)):
            return None
        steps = checkpoints.plan_loading(listed, engines, self.runtime.topology, self.library)
        return [*steps, *(optimizer.note_no_gradients for optimizer in self._optimizers)]

    def _engine_of(self, model: Any) -> Any:
        """Return the engine around a model, or the model where it has none."""
        return next((engine.engine for engine in self._engines if engine.engine.module is model), model)


def _needs_own_backward(engine: Any) -> bool:
    return not engine._support_torch_style_backward or engine.optimizer.needs_scaler()


def _is_wanted(optimizer: DeepSpeedOptimizerWrapper, wanted: set[int]) -> bool:
    """Return whether to clip the parameters of an engine; ValueError where only some of them are wanted."""
    model = optimizer.engine.engine.module
    own = {id(item) for item in model.parameters() if item.requires_grad}
    if own & wanted and not own <= wanted:
        raise ValueError(
            f"DeepSpeed clips all parameters of a model together: {len(own & wanted)} of {len(own)} were given"
        )
    return bool(own & wanted)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype)
