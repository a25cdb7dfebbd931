"""What a logged value is for a tracker: a number, a plain value, or nothing that it can take."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from ..caller import warn


def as_number(value: Any) -> float | None:
    """Return a value as a float.

    Args:
        value: anything.

    Returns:
        The float of a real number, or of a tensor or array of one element; None for everything else.
    """
    value = _item(value)
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers, as floats.

    Args:
        values: values by name; see `as_number` for what counts as a number.
    """
    found = {str(name): as_number(value) for name, value in values.items()}
    return {name: number for name, number in found.items() if number is not None}


def read_step(step: Any) -> int | None:
    """Return the number of a step.

    Args:
        step: a number, or a tensor or array of one element; None where the values belong to no step.

    Raises:
        TypeError, ValueError: it is no number of a step, such as 0.5.
    """
    if step is None:
        return None
    problem = f"step={step!r}: a whole number is needed"
    try:
        value = _item(step)
        number = int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise (TypeError if isinstance(error, TypeError) else ValueError)(problem) from None
    if hasattr(value, "__float__") and number != value:  # `int` cuts off what is behind the point
        raise ValueError(problem)
    return number


def plain(value: Any) -> Any:
    """Return a value in the types of YAML: None, bool, int, float, str, list, dict.

    Args:
        value: anything. Containers are converted with all that is in them; what has no such type becomes its text.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner) for inner in value]
    value = _item(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Integral):
        return int(value)
    number = as_number(value)
    return str(value) if number is None else number


def warn_dropped(tracker: str, name: str, value: Any) -> None:
    """Warn that a tracker cannot take a value.

    Args:
        tracker: name of the tracker.
        name: name of the value. Python shows the warning once for each name, type and line of the user.
        value: the value, of which the type is told.
    """
    warn(f"{tracker} cannot log {name!r}: a {type(value).__name__} is no number")


def _item(value: Any) -> Any:
    """Return the one element of a tensor, of an array or of a number of NumPy as a Python value; others as they are."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else value
    is_numpy = type(value).__module__.partition(".")[0] == "numpy"
    return value.item() if is_numpy and getattr(value, "size", 0) == 1 else value
