"""The accelerator's preparation of models, optimizers, data loaders and schedulers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from .. import detect, devices
from ..caller import warn
from ..combinations import refuse
from ..compilation import DynamoBackend
from ..data_loader.prepare import prepare_data_loader
from ..data_loader.skip import skip_first_batches
from ..deepspeed.dummies import DummyOptim, DummyScheduler
from ..optimizer import AcceleratedOptimizer
from ..scheduler import AcceleratedScheduler
from ..strategies.base import Bundle
from .base import Shared
from .kinds import check_placement, require_model, require_optimizer, require_scheduler, require_trained

_MARK = "_is_accelerate_prepared"
_SIZE = "_prepared_for_processes"
"""Of what was prepared: the number of processes of the run."""
_PLACE = "_prepared_by"
"""Where the accelerator was made that prepared it: file and line."""


class PreparePart(Shared):
    """Make objects ready for the run, and let go of them."""

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make objects ready for the run.

        Args:
            args: models, optimizers, data loaders and schedulers in any order and number; anything else, and what
                is prepared already, comes back as it is.
            device_placement: for each object, whether to move it to the device; None for the accelerator's choice.

        Returns:
            The prepared objects as a tuple; a single one as itself.

        Raises:
            ValueError: `device_placement` has another length, a model is spread over devices, or an optimizer, data
                loader or scheduler was prepared in a run of another number of processes. Such a model is prepared
                anew.
            TypeError: `device_placement` is no list of True, False and None.
            AttributeError: the state of the accelerator was reset.
        """
        self._check_state()
        if device_placement is None:
            device_placement = [None] * len(args)
        else:
            device_placement = check_placement(device_placement, len(args))
        places = [self.device_placement if place is None else place for place in device_placement]
        results = list(args)
        ready: list[int] = []
        if self._asks_for_models():
            ready = [index for index, item in enumerate(results) if isinstance(item, torch.nn.Module)]
        for index in ready:
            results[index] = self.prepare_model(results[index], device_placement=device_placement[index])
        self._prepare_training(results, places, evaluation=False, ready=ready)
        for index, item in enumerate(results):
            if isinstance(item, DataLoader):
                results[index] = self.prepare_data_loader(item, device_placement=places[index])
        for index, item in enumerate(results):
            if isinstance(item, LRScheduler):
                results[index] = self.prepare_scheduler(item)
            elif isinstance(item, AcceleratedScheduler):
                self._refuse_other_run(item)
        return results[0] if len(results) == 1 else tuple(results)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Make a model ready for the run.

        Args:
            model: the model.
            device_placement: whether to move it to the device; by default the accelerator's choice.
            evaluation_mode: only move it and give it its precision: it is not to be trained.

        Returns:
            The model, or a wrapper around it.

        Raises:
            ValueError: several processes are to train a model that is spread over devices.
            TypeError: it is no model.
        """
        require_model("prepare_model", model)
        results: list[Any] = [model]
        place = self.device_placement if device_placement is None else device_placement
        self._prepare_training(results, [place], evaluation=evaluation_mode)
        return results[0]

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return an optimizer that steps only when gradients are complete.

        Args:
            optimizer: of torch; a prepared one is returned as it is.
            device_placement: whether to move its state to where its parameters are; by default the accelerator's
                choice.

        Raises:
            TypeError: it is no optimizer.
        """
        place = self.device_placement if device_placement is None else device_placement
        if isinstance(optimizer, AcceleratedOptimizer):
            self._refuse_other_run(optimizer)
            _remember(self._optimizers, optimizer)
            return optimizer
        require_optimizer(optimizer)
        self._hand_over()
        self._strategy.follow(optimizer)
        _warn_of_offloaded(optimizer)
        prepared = AcceleratedOptimizer(
            optimizer,
            device_placement=place,
            scaler=self._precision.scaler,
            runtime=self._runtime,
            hooks=self._strategy if self._strategy.wraps_steps else None,
        )
        self._mark(prepared)
        self._optimizers.append(prepared)
        if self._precision.scaler is not None:
            self._precision.scaler.follow(optimizer)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
        *,
        already_sharded: bool | None = None,
    ) -> DataLoader[Any]:
        """Return a loader that gives this process its share of the batches, as `dataloader_config` says.

        Args:
            data_loader: of torch; a prepared one is returned as it is.
            device_placement: whether to move batches to the device; by default the accelerator's choice.
            slice_fn_for_dispatch: takes the part of a process out of a batch that rank 0 read; called as
                `slice_fn(batch, slice, process_index=, num_processes=)`.
            already_sharded: whether each process made the loader of its own share; None for what `dataloader_config`
                says.

        Raises:
            ValueError: the batch size is no multiple of the number of processes with `split_batches`, or the loader's
                sampler is for other processes.
            TypeError: it is no loader.
        """
        if getattr(data_loader, _MARK, False):
            self._refuse_other_run(data_loader)
            _remember(self._dataloaders, data_loader)
            return data_loader
        place = self.device_placement if device_placement is None else device_placement
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            self._runtime.device,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=self._strategy.mesh,
            runtime=self._runtime,
            already_sharded=config.already_sharded if already_sharded is None else already_sharded,
        )
        self._mark(prepared)
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Return a scheduler that steps when its optimizer did.

        Args:
            scheduler: of torch; a prepared one is returned as it is. If its optimizer was not prepared, it follows
                all that were.

        Raises:
            TypeError: it is no scheduler.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            self._refuse_other_run(scheduler)
            _remember(self._schedulers, scheduler)
            return scheduler
        require_scheduler(scheduler)
        raw = getattr(scheduler, "optimizer", None)
        own = [
            optimizer
            for optimizer in self._optimizers
            if raw is optimizer or raw is optimizer.optimizer or (raw is not None and raw is optimizer.raw)
        ]
        prepared = AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.dataloader_config.split_batches,
            num_shares=self._strategy.num_shares,
            runtime=self._runtime,
        )
        self._mark(prepared)
        self._schedulers.append(prepared)
        return prepared

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """Return the user's model without the wrappers of `prepare`.

        Args:
            model: prepared or not; it stays as it is.
            keep_fp32_wrapper: False gives the user's model its own forward back, without mixed precision.
            keep_torch_compile: False returns the model that was compiled, not the compiled one.

        Raises:
            TypeError: it is no model.
        """
        require_model("unwrap_model", model)
        return self._strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the whole state of a prepared model; every process calls it.

        Args:
            model: prepared or not.
            unwrap: False keeps the prefixes that wrappers put in front of names.

        Returns:
            Tensors by name. Where weights are sharded, only the first process of each node gets them, and the
            others an empty dict.

        Raises:
            TypeError: it is no model.
        """
        require_trained("get_state_dict", model)
        return self._strategy.state_dict(model) if unwrap else model.state_dict()

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader whose iterations leave out the first batches, to go on in the middle of an epoch.

        Args:
            dataloader: prepared or not.
            num_batches: how many to leave out. After `load_state` they are batches of a process of the run that saved
                the checkpoint: another number of processes goes on with the first sample that was not read.

        Raises:
            TypeError: `num_batches` is no integer, or `dataloader` no loader.
            ValueError: `num_batches` is negative, or other processes saved the checkpoint and the loader cannot start
                where they stopped.
        """
        return skip_first_batches(dataloader, num_batches=num_batches)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return True if a part of the model was spread over several devices by a device map."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects.

        The memory is free once no variable of the caller refers to them: `model, optimizer = free_memory(model,
        optimizer)`.

        Args:
            objects: any.

        Returns:
            A None for each argument.
        """
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self._strategy.release()
        self.step = 0
        released: list[None] = [None for _ in objects]
        del objects
        gc.collect()
        devices.empty_cache(self._runtime.device)
        return released

    def clear(self, *objects: Any) -> list[None]:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)

    def _asks_for_models(self) -> bool:
        """Whether models are prepared one by one, since a subclass has its own `prepare_model`.

        DeepSpeed takes a model together with its optimizer: there nobody is asked, as in Accelerate.
        """
        own = getattr(self.prepare_model, "__func__", None)
        return own is not PreparePart.prepare_model and not self._strategy.fills_dummies

    def _prepare_training(
        self,
        results: list[Any],
        places: Sequence[bool],
        *,
        evaluation: bool,
        ready: Collection[int] = (),
    ) -> None:
        """Replace the models and optimizers in `results` by prepared ones; the strategy prepares them in one call.

        Args:
            results: of `prepare` so far.
            places: for each, whether to move it to the device.
            evaluation: as of `prepare_model`.
            ready: where models are that stay as they are.
        """
        models: list[int] = []
        optimizers: list[int] = []
        for index, item in enumerate(results):
            if index in ready:
                continue
            if isinstance(item, torch.nn.Module):
                if self._is_of_other_run(item):
                    results[index] = item = self._strip(item)
                if getattr(item, _MARK, False):
                    _remember(self._models, item)
                else:
                    self._refuse_spread(item)
                    models.append(index)
            elif isinstance(item, (torch.optim.Optimizer, DummyOptim)):
                optimizers.append(index)
        schedulers = [
            index for index, item in enumerate(results) if isinstance(item, (LRScheduler, DummyScheduler))
        ]
        if not (models or optimizers or schedulers):
            return
        self._refuse_strangers(results)
        self._hand_over()
        bundle = self._strategy.prepare(
            Bundle(
                models=tuple(results[index] for index in models),
                placements=tuple(
                    places[index] and not self.verify_device_map(results[index]) for index in models
                ),
                optimizers=tuple(results[index] for index in optimizers),
                schedulers=tuple(results[index] for index in schedulers),
                loaders=tuple(item for item in results if isinstance(item, DataLoader))
                or tuple(self._dataloaders),
                evaluation=evaluation,
                split_batches=self.dataloader_config.split_batches,
            )
        )
        # a strategy may have added what belongs to an optimizer that came alone
        for index, strategic in itertools.zip_longest(models, bundle.models):
            model = self._strategy.compile(strategic, self._dynamo)
            self._mark(model)
            _remember(self._models, model)
            if index is not None:
                results[index] = model
        for index, optimizer in zip(optimizers, bundle.optimizers, strict=True):
            results[index] = self.prepare_optimizer(optimizer, device_placement=places[index])
        for index, scheduler in itertools.zip_longest(schedulers, bundle.schedulers):
            if isinstance(scheduler, AcceleratedScheduler):
                _remember(self._schedulers, scheduler)
                if index is not None:
                    results[index] = scheduler

    def _mark(self, prepared: Any) -> None:
        setattr(prepared, _MARK, True)
        setattr(prepared, _SIZE, self._runtime.topology.world_size)
        setattr(prepared, _PLACE, self._made_at)

    def _is_of_other_run(self, item: Any) -> bool:
        """Whether an object was prepared for another number of processes, in the notebook for example."""
        return getattr(item, _SIZE, None) not in (None, self._runtime.topology.world_size)

    def _refuse_other_run(self, item: Any) -> None:
        if self._is_of_other_run(item):
            raise ValueError(detect.describe_other_run(item, self._runtime.topology.world_size))

    def _strip(self, model: torch.nn.Module) -> Any:
        """Return a model without what a run of another number of processes has added, to be prepared anew."""
        bare = self._strategy.unwrap(model, False, False)
        for name in (_MARK, _SIZE, _PLACE):
            bare.__dict__.pop(name, None)
        return bare

    def _hand_over(self) -> None:
        """Give the handlers to the strategy and the precision, which a copy of this accelerator has too."""
        self._strategy.options = self._ddp_handler
        self._precision.handler, self._precision.recipe = self._autocast_handler, self._recipe

    def _refuse_strangers(self, items: Sequence[Any]) -> None:
        """Refuse what goes with DeepSpeed only, or does not go with it."""
        if self._strategy.fills_dummies and self._dynamo.backend != DynamoBackend.NO:
            raise refuse("deepspeed, compiler", f"dynamo_backend={str(self._dynamo.backend)!r}")
        dummies = [type(item).__name__ for item in items if isinstance(item, (DummyOptim, DummyScheduler))]
        if dummies and not self._strategy.fills_dummies:
            raise refuse("dummies", " and ".join(dummies))

    def _refuse_spread(self, model: torch.nn.Module) -> None:
        if self._runtime.topology.world_size > 1 and self.verify_device_map(model):
            raise refuse("device map, processes", f"{self._runtime.topology.world_size} processes")


def _warn_of_offloaded(optimizer: Any) -> None:
    weights = [weight for group in getattr(optimizer, "param_groups", ()) for weight in group["params"]]
    count = sum(weight.is_meta and weight.requires_grad for weight in weights)
    if count:
        warn(
            f"{count} of {len(weights)} weights of {type(optimizer).__name__} are offloaded, and an optimizer does not "
            "reach them: they are not trained. Freeze them by requires_grad_(False), or keep them on a device"
        )


def _is_known(known: list[Any], item: Any) -> bool:
    return any(other is item for other in known)


def _remember(known: list[Any], item: Any) -> None:
    if not _is_known(known, item):
        known.append(item)
