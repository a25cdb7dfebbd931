"""Guards models whose parts have their places against being moved as a whole."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from ..hooks.align import align_hook


class _Move:
    """`to`, `cuda` and the like of a model with hooks, which brings its weights where they compute by itself."""

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
            warnings.warn(
                f"model.{self._name}() moves parts that dispatch_model put on their devices, whose hooks stay",
                stacklevel=2,
            )
        return self._inner(*args, **kwargs)


def guard_moves(model: nn.Module) -> None:
    """Refuse to move a model as a whole that has parts elsewhere."""
    for name in ("to", "cpu", "cuda", "xpu"):
        if not isinstance(vars(model).get(name), _Move) and hasattr(model, name):
            vars(model)[name] = _Move(model, name, getattr(model, name))
