"""Training with the whole model in every process and gradients averaged over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ..compilation import find_original, is_compiled_module
from ..handlers import DistributedDataParallelKwargs
from ..precision import Precision
from ..runtime import Runtime
from . import tensor_parallel
from .base import Bundle, Plugins, Strategy
from .single import SingleDevice


class DataParallel(SingleDevice):
    """Wraps models that have something to train in DistributedDataParallel."""

    def __init__(
        self, runtime: Runtime, precision: Precision, options: DistributedDataParallelKwargs | None = None
    ) -> None:
        super().__init__(runtime, precision)
        self.options = options

    @classmethod
    def create(cls, runtime: Runtime, precision: Precision, plugins: Plugins) -> Strategy:
        return cls(runtime, precision, plugins.ddp)

    def prepare(self, bundle: Bundle) -> Bundle:
        bundle = super().prepare(bundle)
        if bundle.evaluation:
            return bundle
        return dataclasses.replace(bundle, models=tuple(self._wrap(model) for model in bundle.models))

    def _wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        if tensor_parallel.is_split(model):
            raise ValueError(
                f"{type(model).__name__} is split over processes, which have to get the same batches: give "
                "Accelerator(parallelism_config=ParallelismConfig(tp_size=...)) the number of these processes"
            )
        device = self.runtime.device
        wrapped = DistributedDataParallel(
            model,
            device_ids=None if device.type == "cpu" else [device.index],
            **({} if self.options is None else self.options.to_kwargs()),
        )
        if self.options is not None:
            self.options.register_comm_hook(wrapped)
        _let_group_end_last(wrapped)
        named = wrapped.module.named_parameters()
        if frozen := {name: weight for name, weight in named if not weight.requires_grad}:
            wrapped.register_forward_pre_hook(_FrozenWeights(frozen))
        return wrapped

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        wrapped = _wrapper(model)
        return wrapped.no_sync() if wrapped is not None else nullcontext()

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        wrapped = _wrapper(model)
        return _force_sync(wrapped) if wrapped is not None else nullcontext()

    def joinable(self, model: Any) -> Any:
        return _wrapper(model) or model


def _let_group_end_last(wrapped: DistributedDataParallel) -> None:
    """Let the model, when it goes, let go of the process group after the reducer, which has it too.

    After `destroy_process_group` these are the last that have it. If the reducer is the very last, gloo's threads are
    waited for with the interpreter's lock held, and one of them may wait for that lock: the process hangs (torch 2.13).
    """
    vars(wrapped)["process_group"] = vars(wrapped).pop("process_group")


class _FrozenWeights:
    """Raises before a forward whose gradients are averaged, once weights are trained that were frozen until now.

    DistributedDataParallel looks once for the weights that it averages, and the processes would drift apart in silence.

    Args:
        frozen: these weights by name.
    """

    def __init__(self, frozen: dict[str, torch.nn.Parameter]) -> None:
        self.frozen = frozen

    def __call__(self, wrapped: DistributedDataParallel, *_: Any) -> None:
        trained = [name for name, weight in self.frozen.items() if weight.requires_grad]
        if trained and torch.is_grad_enabled() and wrapped.require_backward_grad_sync:
            raise RuntimeError(
                f"weights were frozen when prepare wrapped the model and are trained now ({len(trained)}, the first is "
                f"{trained[0]!r}): their gradients would not be averaged over the processes. Unfreeze before prepare, "
                "or go on with model = accelerator.prepare(accelerator.unwrap_model(model))"
            )


def _wrapper(model: Any) -> DistributedDataParallel | None:
    """Return the wrapper that reduces the model's gradients, also out of a compiled one; None without one."""
    inner = find_original(model) if is_compiled_module(model) else model
    return inner if isinstance(inner, DistributedDataParallel) else None


@contextmanager
def _force_sync(model: DistributedDataParallel) -> Iterator[None]:
    before = model.require_backward_grad_sync, model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    try:
        for hook in model._forward_pre_hooks.values():  # as the forward would have done without no_sync
            if isinstance(hook, _FrozenWeights):
                hook(model)
        model.reducer.prepare_for_backward([])
        yield
    finally:
        model.require_backward_grad_sync, model.require_forward_param_sync = before
