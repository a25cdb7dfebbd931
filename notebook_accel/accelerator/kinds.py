"""What methods take: an object of another kind is named by an error before anything changes.

What a method uses decides, not the class alone, since libraries have optimizers, loaders and schedulers of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def require_model(method: str, model: Any) -> None:
    """Check that an object is a model.

    Args:
        method: whose argument it is.
        model: the object.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(model, torch.nn.Module):
        raise _wrong(method, "a model, a torch.nn.Module", model)


def require_trained(method: str, model: Any) -> None:
    """Check that an object is a model; what has a `no_sync` of its own counts as one.

    Args:
        method: whose argument it is.
        model: the object.

    Raises:
        TypeError: it is none.
    """
    if not hasattr(model, "no_sync"):
        require_model(method, model)


def list_trained(models: Iterable[Any]) -> Iterator[Any]:
    """Yield the models of `accumulate` one by one, those in lists too.

    Args:
        models: the objects.

    Raises:
        TypeError: one of them is no model.
    """
    for model in models:
        if isinstance(model, (list, tuple)):
            yield from list_trained(model)
        else:
            require_trained("accumulate", model)
            yield model


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
    if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
        raise _wrong("prepare_scheduler", "a scheduler of torch", scheduler)


def require_handler(method: str, handler: Any, kind: type) -> None:
    """Check that a handler, where there is one, is of a kind.

    Args:
        method: whose argument it is.
        handler: the object, or None.
        kind: of handlers.

    Raises:
        TypeError: it is of another kind.
    """
    if not (handler is None or isinstance(handler, kind)):
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


def check_placement(device_placement: Any, num_objects: int) -> None:
    """Check what `prepare` is told about places.

    Args:
        device_placement: a list of True, False or None.
        num_objects: for how many objects.

    Raises:
        TypeError: it is no such list.
        ValueError: it has another length.
    """
    if not isinstance(device_placement, (list, tuple)) or not all(
        place is None or isinstance(place, bool) for place in device_placement
    ):
        raise TypeError(
            f"device_placement={device_placement!r}: a list is needed, with True, False or None for each object"
        )
    if len(device_placement) != num_objects:
        raise ValueError(f"device_placement has {len(device_placement)} items for {num_objects} objects")


def _wrong(method: str, needed: str, found: Any) -> TypeError:
    what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
    return TypeError(f"{method} takes {needed}, not {'None' if found is None else what}")
