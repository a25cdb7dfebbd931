"""Training on the device of one process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..precision import Precision
from ..runtime import Runtime
from .base import Bundle, Plugins, Strategy


class SingleDevice(Strategy):
    """Moves models to the device and applies the precision; the model stays the user's own object."""

    def __init__(self, runtime: Runtime, precision: Precision) -> None:
        self.runtime = runtime
        self.precision = precision
        self._renewed = WeakTensorKeyDictionary()
        self._followers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_renewed": list(self._renewed.items()), "_followers": list(self._followers)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._renewed = WeakTensorKeyDictionary()
        self._renewed.update(state["_renewed"])
        self._followers = weakref.WeakSet(state["_followers"])

    @classmethod
    def check(cls, runtime: Runtime, mode: str, plugins: Plugins) -> None:
        """Do nothing: one device takes all that chose this strategy."""

    @classmethod
    def create(cls, runtime: Runtime, precision: Precision, plugins: Plugins) -> Strategy:
        return cls(runtime, precision)

    def prepare(self, bundle: Bundle) -> Bundle:
        for model, place in zip(bundle.models, bundle.placements, strict=True):
            self._place(model, place)
        for optimizer in bundle.optimizers:
            self.follow(optimizer)
        return bundle

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        self._followers.add(optimizer)
        self._switch(optimizer)

    def _switch(self, optimizer: torch.optim.Optimizer) -> None:
        _switch_parameters(optimizer, self._renewed)

    def _renew(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Note which parameters others took the places of, and tell the optimizers."""
        if pairs:
            self._renewed.update(pairs)
            for optimizer in self._followers:
                self._switch(optimizer)

    def _place(self, model: torch.nn.Module, move: bool) -> None:
        before = list(model.parameters())
        if move:
            _move(model, self.runtime.device)
        self.precision.apply(model)
        # torch moves parameters in place, except to XLA devices or when told to make new ones
        self._renew([pair for pair in zip(before, model.parameters(), strict=True) if pair[0] is not pair[1]])


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move the model; where torch makes new parameters for it, those that layers shared are shared again."""
    owned = [
        (module, name, old)
        for module in model.modules()
        for name, old in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    model.to(device)
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module, name, old in owned:
        new = getattr(module, name)
        if kept.setdefault(old, new) is not new:
            setattr(module, name, kept[old])


def _switch_parameters(optimizer: torch.optim.Optimizer, renewed: WeakTensorKeyDictionary) -> None:
    if not len(renewed):
        return
    for group in optimizer.param_groups:
        for old in group["params"]:
            if old in renewed and old in optimizer.state:
                optimizer.state[renewed[old]] = optimizer.state.pop(old)
        # in place, because LBFGS keeps the list
        group["params"][:] = [renewed.get(parameter, parameter) for parameter in group["params"]]
