"""LossScaler: scales the losses of float16, and the gradients back."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .comm.base import Comm
from .dtensors import to_local
from .gradients import list_of, unscale

_Versions = list[tuple[int, int]]
_Unscaled = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Versions | None]


class LossScaler(torch.amp.GradScaler):
    """A gradient scaler for several optimizers that share a loss: it updates its scale at the start of the next loss.

    An update after the first optimizer's step would be wrong for the second: it would divide its gradients twice, or by
    a scale that differs from that of its loss. Gradients that an optimizer still accumulates change with the scale.

    Args:
        device: device type of the losses.
        kwargs: arguments of `torch.amp.GradScaler`.
    """

    def __init__(self, device: str, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._update_is_due = False
        self._comm: Comm | None = None
        # optimizers whose gradients are unscaled, and what these were at the last loss after that
        self._unscaled: _Unscaled = weakref.WeakKeyDictionary()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer's gradients change with the scale.

        Args:
            optimizer: the raw optimizer.
        """
        self._optimizers.add(optimizer)

    def share(self, comm: Comm) -> None:
        """Let all processes skip a step where one of them found an infinite value: they hold parts of one model.

        Args:
            comm: of the processes. Each calls `unscale_` and `step` as often as the others.
        """
        self._comm = comm if comm.world_size > 1 else None

    def request_update(self) -> None:
        """Let the next loss call `update` first."""
        self._update_is_due = True

    def get_scale(self) -> float:
        """Return the scale of the next loss, also right after a step."""
        if not (self._update_is_due and self.is_enabled()):
            return super().get_scale()
        scale, tracker = self._check_scale_growth_tracker("get_scale")
        states = self._per_optimizer_states
        self._scale, self._growth_tracker = scale.clone(), tracker.clone()
        self._per_optimizer_states = copy.deepcopy(states)  # torch adds up what it has found in place
        try:  # other optimizers may still have gradients of the old scale
            super().update()
            return super().get_scale()
        finally:
            self._scale, self._growth_tracker, self._per_optimizer_states = scale, tracker, states

    def _apply_update(self) -> None:
        if self._update_is_due:
            self.update()

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adapt the scale to the infinite values that the last steps found.

        Args:
            new_scale: the scale to set instead.
        """
        self._update_is_due = False
        self._unscaled.clear()
        if not self.is_enabled() or self._scale is None:
            super().update(new_scale)
            return
        before, stages = self._scale.clone(), [(item, self._stage(item)) for item in self._optimizers]
        super().update(new_scale)
        waiting = {}  # of models that accumulate, while another one has stepped; each once, where optimizers share it
        for optimizer, stage in stages:
            if stage is not OptState.STEPPED:
                factor = self._scale if stage is OptState.UNSCALED else self._scale / before
                waiting.update(dict.fromkeys(list_of(optimizer), factor))
        for gradient, factor in waiting.items():
            to_local(gradient).mul_(factor.to(gradient.device))

    def scale(self, outputs: Any) -> Any:
        """Multiply outputs by the scale.

        Args:
            outputs: a tensor, or nested iterables of tensors.
        """
        self._apply_update()
        self._note_unscaled()
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide gradients by the scale, unless this was done since the last step.

        Args:
            optimizer: the raw optimizer.

        Raises:
            RuntimeError: a backward pass has added scaled gradients to unscaled ones.
        """
        if self._stage(optimizer) is OptState.STEPPED:
            self._apply_update()
        if self._stage(optimizer) is OptState.UNSCALED:
            self._check_nothing_added(optimizer)
        elif self.is_enabled():
            super().unscale_(optimizer)
            self._unscaled[optimizer] = None

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step, unless a gradient is infinite or NaN.

        Args:
            optimizer: the raw optimizer.
            args: of its `step`.
            kwargs: of its `step`.

        Returns:
            What its `step` returns; None if it was skipped.
        """
        self.follow(optimizer)  # one that was unpickled with the scaler
        if self._stage(optimizer) is OptState.STEPPED:
            self._apply_update()
        if self._comm is not None or self._stage(optimizer) is OptState.UNSCALED:
            # here, because some optimizers would do it by themselves, in each process alone
            self.unscale_(optimizer)
        return super().step(optimizer, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and its growth factors."""
        self._apply_update()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._apply_update()
        return {**super().__getstate__(), "_comm": None, "_unscaled": None, "_optimizers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._unscaled = weakref.WeakKeyDictionary()
        self._optimizers = weakref.WeakSet()

    def found_inf(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer's last gradients had an infinite or NaN value.

        Args:
            optimizer: the raw optimizer.
        """
        if not self.is_enabled():
            return False
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        return any(bool(value.item()) for value in found.values())

    def _stage(self, optimizer: torch.optim.Optimizer) -> OptState:
        if not self.is_enabled():
            return OptState.READY
        # torch makes the entry of an optimizer when it is first read
        stage: OptState = self._per_optimizer_states[id(optimizer)]["stage"]
        return stage

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Divide gradients by the scale as torch does, also DTensors of several meshes together with whole ones."""
        if self._comm is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        gradients = list_of(optimizer)
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("float16 gradients cannot be unscaled: keep the weights in float32")
        with torch.no_grad():
            found = unscale(gradients, inv_scale)
        found = self._comm.all_reduce(found.to(self._comm.device), "max")
        return {found.device: found}

    def _note_unscaled(self) -> None:
        """Note the gradients that are unscaled already, because a new loss may add to them."""
        for optimizer in list(self._unscaled):
            if list_of(optimizer):
                self._unscaled[optimizer] = _versions(optimizer)
            else:  # dropped without a step: those that come are scaled
                del self._unscaled[optimizer], self._per_optimizer_states[id(optimizer)]

    def _check_nothing_added(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if gradients that were unscaled have changed since the last loss."""
        before = self._unscaled.get(optimizer)
        if before is not None and before != _versions(optimizer):
            raise RuntimeError(
                "a backward pass has added scaled gradients to gradients that were unscaled, or clipped, before it: "
                "unscale and clip once for each step, after its last backward pass"
            )
        self._unscaled[optimizer] = None


def _versions(optimizer: torch.optim.Optimizer) -> _Versions:
    """Return what changes when gradients are added to, without reading them."""
    return [(id(gradient), to_local(gradient)._version) for gradient in list_of(optimizer)]
