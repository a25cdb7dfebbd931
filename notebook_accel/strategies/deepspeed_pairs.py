"""Which optimizer and scheduler belong to which model of one `prepare`: DeepSpeed takes them together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..zero.dummies import DummyOptim, DummyScheduler
from ..zero.plugin import DeepSpeedPlugin
from .base import Bundle


@dataclass(frozen=True, kw_only=True, slots=True)
class Trio:
    """A model with what trains it, by their places in the bundle.

    Attributes:
        model: its place.
        optimizer: place of its optimizer, None without one.
        scheduler: place of the stand-in for its scheduler, None without one.
        makes_engine: whether DeepSpeed has a part in it.
    """

    model: int
    optimizer: int | None = None
    scheduler: int | None = None
    makes_engine: bool = True


def trios(bundle: Bundle, plugin: DeepSpeedPlugin) -> list[Trio]:
    """Return a trio for each model.

    Raises:
        ValueError: an optimizer belongs to no model, to several, or is one of several of a model; or a model that is to
            be trained comes without one.
    """
    owners = [
        _owner(optimizer, bundle.models) for optimizer in bundle.optimizers
    ]  # by optimizer, the place of its model
    found = []
    for place, model in enumerate(bundle.models):
        own = [index for index, owner in enumerate(owners) if owner == place]
        if len(own) > 1:
            raise ValueError(
                f"DeepSpeed trains a model by one optimizer, and {len(own)} were prepared with it"
            )
        optimizer = own[0] if own else None
        shards = plugin.hf_ds_config.is_zero3()
        frozen = not any(item.requires_grad for item in model.parameters())
        if optimizer is None and not (bundle.evaluation or frozen):
            raise ValueError(
                f"{type(model).__name__} came without its optimizer: call prepare(model, optimizer) with both, or "
                "prepare_model(model, evaluation_mode=True) if it is not to be trained"
            )
        found.append(
            Trio(
                model=place,
                optimizer=optimizer,
                scheduler=None if optimizer is None else _scheduler_of(bundle, optimizer),
                makes_engine=optimizer is not None or shards,
            )
        )
    return found


def _owner(optimizer: Any, models: tuple[torch.nn.Module, ...]) -> int:
    trained = {id(parameter) for parameter in _parameters(optimizer)}
    owners = [
        place for place, model in enumerate(models) if trained & {id(item) for item in model.parameters()}
    ]
    if len(owners) != 1:
        many = "several models" if owners else "none of the models"
        raise ValueError(
            f"the parameters of {type(optimizer).__name__} belong to {many} in this call of prepare: DeepSpeed needs a "
            "model together with an optimizer of its own"
        )
    return owners[0]


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    groups = optimizer.params if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    return [item for group in groups for item in (group["params"] if isinstance(group, dict) else [group])]


def _scheduler_of(bundle: Bundle, optimizer: int) -> int | None:
    return next(
        (
            place
            for place, scheduler in enumerate(bundle.schedulers)
            if isinstance(scheduler, DummyScheduler) and scheduler.optimizer is bundle.optimizers[optimizer]
        ),
        None,
    )
