"""Engines that were released: an optimizer that is prepared without its model goes into the engine that it had."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Final

import torch

from ..strategies.base import Bundle
from .dummies import dummy_of, parameters_of

_HOOKS: Final = ("module_forward_pre_hook", "module_forward_post_hook")
_OPTIMIZERS: Final = ("optimizer", "basic_optimizer", "client_optimizer")


class ReleasedEngines:
    """Remembers engines as long as somebody keeps them.

    Trainer keeps its engine from one training to the next. It prepares the second optimizer alone, and goes on with the
    engine of the first.
    """

    def __init__(self) -> None:
        self._engines: list[weakref.ref[Any]] = []

    def add(self, engine: Any) -> None:
        """Take everything off the model of an engine, and free what it has of its optimizer.

        Args:
            engine: of DeepSpeed.
        """
        engine.destroy()  # removes hooks of ZeRO
        for name in _HOOKS:
            if (hook := getattr(engine, name, None)) is not None:
                hook.remove()
        for name in _OPTIMIZERS:  # an engine that is collected would destroy them once more
            setattr(engine, name, None)
        self._engines.append(weakref.ref(engine))

    def complete(self, bundle: Bundle) -> tuple[Bundle, list[Any]]:
        """Add the models and schedulers of optimizers that are prepared alone.

        Args:
            bundle: of `prepare`.

        Returns:
            The bundle, its new models and schedulers last, and the engine that each new model had.
        """
        trained = [{id(item) for item in parameters_of(optimizer)} for optimizer in bundle.optimizers]
        given = {id(item) for model in bundle.models for item in model.parameters()}
        engines: list[Any] = []
        schedulers = list(bundle.schedulers)
        for engine in filter(None, (found() for found in self._engines)):
            own = {id(item) for item in engine.module.parameters()}
            indices = [index for index, wanted in enumerate(trained) if wanted & own and not wanted & given]
            if indices and not any(engine is other or engine.module is other.module for other in engines):
                engines.append(engine)
                dummies = (dummy_of(bundle.optimizers[index]) for index in indices)
                schedulers += [item for item in dummies if item is not None and not _has(schedulers, item)]
        completed = dataclasses.replace(
            bundle,
            models=(*bundle.models, *(engine.module for engine in engines)),
            placements=(*bundle.placements, *(True for _ in engines)),
            schedulers=tuple(schedulers),
        )
        return completed, engines

    def forget(self, models: tuple[torch.nn.Module, ...]) -> None:
        """Forget the engines of models that have new ones.

        Args:
            models: the users'.
        """
        self._engines = [
            found
            for found in self._engines
            if (engine := found()) is not None and not _has(models, engine.module)
        ]


def become(old: Any, new: Any) -> Any:
    """Let an object that others keep be another one from now on, and return it.

    Args:
        old: an engine that was released, or a stand-in.
        new: the engine or scheduler that was made for it. Both have the same attributes afterwards.
    """
    attributes = vars(new)
    attributes["_made"] = (new,)  # an engine that is collected would destroy what both have
    old.__class__ = type(new)
    object.__setattr__(old, "__dict__", attributes)
    return old


def _has(items: Any, wanted: Any) -> bool:
    return any(item is wanted for item in items)
