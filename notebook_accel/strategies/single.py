"""Training on the device of one process."""

from __future__ import annotations

import torch

from .base import Bundle, Strategy


class SingleDevice(Strategy):
    """Moves models to the device and applies the precision; the model stays the user's own object."""

    def prepare(self, bundle: Bundle) -> Bundle:
        for model, place in zip(bundle.models, bundle.placements, strict=True):
            self._place(model, place, bundle.optimizers)
        return bundle

    def _place(
        self, model: torch.nn.Module, move: bool, optimizers: tuple[torch.optim.Optimizer, ...]
    ) -> None:
        before = list(model.parameters())
        if move:
            _move(model, self.runtime.device)
        self.precision.apply(model)
        # torch moves parameters in place, unless told to make new ones; the optimizers follow
        renewed = {old: new for old, new in zip(before, model.parameters(), strict=True) if old is not new}
        if renewed:
            for optimizer in optimizers:
                _switch_parameters(optimizer, renewed)


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move the model; where torch makes new parameters for it, those that layers shared are shared again."""
    names = dict(model.named_parameters(remove_duplicate=False))
    model.to(device)
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, old in names.items():
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        new = getattr(module, own_name)
        if kept.setdefault(old, new) is not new:
            setattr(module, own_name, kept[old])


def _switch_parameters(
    optimizer: torch.optim.Optimizer, renewed: dict[torch.nn.Parameter, torch.nn.Parameter]
) -> None:
    for group in optimizer.param_groups:
        group["params"] = [renewed.get(parameter, parameter) for parameter in group["params"]]
    for old, new in renewed.items():
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
