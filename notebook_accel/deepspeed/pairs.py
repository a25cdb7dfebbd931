"""Pairs each model of a `prepare` with its optimizer and scheduler, which DeepSpeed needs together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..strategies.base import Bundle
from .dummies import DummyScheduler, parameters_of
from .plugin import DeepSpeedPlugin


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """A model with its optimizer and scheduler, by their indices in the bundle.

    Attributes:
        model: index of the model.
        optimizer: index of its optimizer, None without one.
        scheduler: index of its `DummyScheduler`, None without one.
        needs_engine: whether DeepSpeed makes an engine of the model.
    """

    model: int
    optimizer: int | None = None
    scheduler: int | None = None
    needs_engine: bool = True


def pair_models(bundle: Bundle, plugin: DeepSpeedPlugin) -> list[Pairing]:
    """Return a pairing for each model of the bundle, in order.

    Args:
        bundle: not prepared yet.
        plugin: the selected one; under ZeRO 3 a model without an optimizer needs an engine too.

    Raises:
        ValueError: an optimizer trains no model or several; a model has several optimizers; a model that is to be
            trained has none. Under ZeRO 3 a model without one is for evaluation.
    """
    owners = [_find_owner(optimizer, bundle.models) for optimizer in bundle.optimizers]
    pairings = []
    for index, model in enumerate(bundle.models):
        own = [number for number, owner in enumerate(owners) if owner == index]
        if len(own) > 1:
            raise ValueError(
                f"DeepSpeed trains a model by one optimizer, and {len(own)} were prepared with it"
            )
        optimizer = own[0] if own else None
        shards = plugin.hf_ds_config.is_zero3()
        is_frozen = not any(item.requires_grad for item in model.parameters())
        if optimizer is None and not (bundle.evaluation or is_frozen or shards):
            raise ValueError(
                f"{type(model).__name__} came without its optimizer: call prepare(model, optimizer) with both, or "
                "prepare_model(model, evaluation_mode=True) if it is not to be trained"
            )
        pairings.append(
            Pairing(
                model=index,
                optimizer=optimizer,
                scheduler=None if optimizer is None else _find_scheduler(bundle, optimizer),
                needs_engine=optimizer is not None or shards,
            )
        )
    return pairings


def _find_owner(optimizer: Any, models: tuple[torch.nn.Module, ...]) -> int:
    """Return the index of the model whose parameters the optimizer trains."""
    trained = {id(parameter) for parameter in parameters_of(optimizer)}
    owners = [
        index for index, model in enumerate(models) if trained & {id(item) for item in model.parameters()}
    ]
    if len(owners) != 1:
        many = "several models" if owners else "none of the models"
        raise ValueError(
            f"the parameters of {type(optimizer).__name__} belong to {many} in this call of prepare: DeepSpeed needs a "
            "model together with an optimizer of its own. To train a prepared model by another optimizer, call "
            "free_memory() first"
        )
    return owners[0]


def _find_scheduler(bundle: Bundle, optimizer: int) -> int | None:
    return next(
        (
            index
            for index, scheduler in enumerate(bundle.schedulers)
            if isinstance(scheduler, DummyScheduler) and scheduler.optimizer is bundle.optimizers[optimizer]
        ),
        None,
    )
