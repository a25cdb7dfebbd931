"""Refuses to move a model as a whole if its parts have their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .. import devices
from ..caller import warn
from ..hooks.align import align_hook


class _Move:
    """Stands for `to`, `cuda` and the like of a model whose hooks bring the weights to where they compute."""

    def __init__(self, model: nn.Module, name: str, inner: Callable[..., Any]) -> None:
        self._model = model
        self._name = name
        self._inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(align_hook(part) is not None for part in self._model.modules()):
            raise RuntimeError(
                f"model.{self._name}(): parts of this model are on the CPU or the disk and come to their device for "
                "the forward; take the hooks off first, by notebook_accel.hooks.remove_hook_from_submodules(model)"
            )
        if any("_hf_hook" in vars(part) for part in self._model.modules()):
            warn(
                f"model.{self._name}() moves parts that dispatch_model put on their devices, whose hooks stay",
            )
        return self._inner(*args, **kwargs)


def guard_moves(model: nn.Module) -> None:
    """Make `to`, `cpu`, `cuda` and the like of a dispatched model raise, or warn if all its weights are on devices.

    Args:
        model: whose methods are replaced.
    """
    for name in ("to", "cpu", *devices.list_modules()):
        if not isinstance(vars(model).get(name), _Move) and hasattr(model, name):
            vars(model)[name] = _Move(model, name, getattr(model, name))
