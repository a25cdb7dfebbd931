"""What methods take: an object of another kind is named by an error before anything changes.

What a method uses decides, not the class alone, since libraries have optimizers, schedulers and wrappers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..checked import is_flag

_MODEL = "a model, a torch.nn.Module"


def require_model(method: str, model: Any) -> None:
    """Check that an object is a model.

    Args:
        method: whose argument it is.
        model: the object.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(model, torch.nn.Module):
        raise _wrong(method, _MODEL, model)


def require_trained(method: str, model: Any) -> None:
    """Check that an object is a model; a wrapper of one counts too, by its `no_sync` or its `parameters`.

    Args:
        method: whose argument it is.
        model: the object.

    Raises:
        TypeError: it is none.
    """
    if isinstance(model, torch.nn.Module):
        return  # first: a module looks long for what it does not have
    if isinstance(model, type) or not (hasattr(model, "no_sync") or hasattr(model, "parameters")):
        raise _wrong(method, _MODEL, model)


def list_trained(models: Iterable[Any]) -> list[Any]:
    """Return the models of `accumulate`, those in lists too.

    Args:
        models: the objects.

    Raises:
        TypeError: one of them is no model.
    """
    found: list[Any] = []
    for model in models:
        if isinstance(model, (list, tuple)):
            found += list_trained(model)
        else:
            require_trained("accumulate", model)
            found.append(model)
    return found


def require_loss(loss: Any) -> None:
    """Check that an object can be run backward, as tensors can.

    Args:
        loss: the object.

    Raises:
        TypeError: it cannot.
    """
    if not hasattr(loss, "backward"):
        raise _wrong("backward", "a loss, a tensor with one element", loss)


def require_optimizer(optimizer: Any) -> None:
    """Check that an object is an optimizer.

    Args:
        optimizer: the object.

    Raises:
        TypeError: it is none.
    """
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        raise _wrong("prepare_optimizer", "an optimizer of torch", optimizer)


def require_scheduler(scheduler: Any) -> None:
    """Check that an object is a scheduler.

    Args:
        scheduler: the object.

    Raises:
        TypeError: it is none.
    """
    is_optimizer = isinstance(scheduler, torch.optim.Optimizer)
    if isinstance(scheduler, type) or is_optimizer or not hasattr(scheduler, "step"):
        raise _wrong("prepare_scheduler", "a scheduler of torch", scheduler)


def require_handler(method: str, handler: Any, kind: type, use: str) -> None:
    """Check that a handler, where there is one, is of a kind or can do the same.

    Args:
        method: whose argument it is.
        handler: the object, or None.
        kind: the class of handlers that the method takes.
        use: name of the handler's method that is called.

    Raises:
        TypeError: it is of another kind.
    """
    if not (handler is None or isinstance(handler, kind) or hasattr(handler, use)):
        raise _wrong(method, kind.__name__, handler)


def require_hook(hook: Any) -> None:
    """Check that a hook can be called, long before it is.

    Args:
        hook: the object.

    Raises:
        TypeError: it cannot.
    """
    if not callable(hook):
        raise TypeError(f"a hook has to be a function, not {hook!r:.80}")


def check_placement(device_placement: Any, num_objects: int) -> list[bool | None]:
    """Return the `device_placement` of `prepare` as a list.

    Args:
        device_placement: True, False or None for each object.
        num_objects: how many objects there are.

    Raises:
        TypeError: it is no such list.
        ValueError: it has another length.
    """
    is_several = not isinstance(device_placement, str) and hasattr(device_placement, "__len__")
    places = list(device_placement) if is_several else []
    if not is_several or not all(map(is_flag, places)):
        raise TypeError(
            f"device_placement={device_placement!r}: a list is needed, with True, False or None for each object"
        )
    if len(places) != num_objects:
        raise ValueError(f"device_placement has {len(places)} items for {num_objects} objects")
    return [None if place is None else bool(place) for place in places]


def _wrong(method: str, needed: str, found: Any) -> TypeError:
    what = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
    return TypeError(f"{method} takes {needed}, not {'None' if found is None else what}")
