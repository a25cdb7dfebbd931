"""Unscales, measures and clips gradients, whole ones and DTensors of any mesh.

torch's own functions take the gradients of one mesh only: those of another, and whole ones, cannot be in the same list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from .comm.base import Comm
from .dtensors import from_local, is_sharded, to_full, to_local

Parameters = Iterable[torch.Tensor] | torch.Tensor


def group_by_mesh(parameters: Parameters) -> list[list[torch.Tensor]]:
    """Return the parameters that have gradients, those of each mesh together.

    Args:
        parameters: whole ones and DTensors.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            groups.setdefault(_mesh(parameter), []).append(parameter)
    return list(groups.values())


def measure_norm(parameters: Parameters, norm_type: float, comm: Comm | None = None) -> torch.Tensor:
    """Return the total norm of all gradients, a tensor with one element.

    Args:
        parameters: those with gradients count.
        norm_type: 2 for the 2-norm; "inf" too.
        comm: given where processes have whole gradients of their own, so that their norms differ: the largest counts
            in all of them, since parts of one weight must not be scaled differently.
    """
    return _measure(group_by_mesh(parameters), float(norm_type), comm)


def clip_norm(
    parameters: Parameters, max_norm: float, norm_type: float, comm: Comm | None = None
) -> torch.Tensor:
    """Clip the gradients to a total norm over all processes, and return the norm before clipping.

    Args:
        parameters: those with gradients count.
        max_norm: the largest total norm.
        norm_type: 2 for the 2-norm; "inf" too.
        comm: as in `measure_norm`.
    """
    groups = group_by_mesh(parameters)
    total = _measure(groups, float(norm_type), comm)
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_value(parameters: Parameters, clip_value: float) -> None:
    """Clip every element of the gradients.

    Args:
        parameters: those whose gradients are clipped.
        clip_value: the largest absolute value.
    """
    for group in group_by_mesh(parameters):
        clip_grad_value_(group, clip_value)


def unscale(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> torch.Tensor:
    """Multiply gradients by a factor, in place.

    Args:
        gradients: whole ones and DTensors, on any devices.
        factor: a tensor with one element.

    Returns:
        1.0 where this process found an infinite or NaN value, else 0.0; a tensor without dimensions on the device of
        the factor.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        part = to_local(gradient)
        if part.is_sparse:
            part = part._values()
        alike.setdefault((part.device, part.dtype), []).append(part)
    found = torch.zeros((), dtype=torch.float32, device=factor.device)  # torch takes no other
    for (device, _), parts in alike.items():
        here = torch.zeros((), dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(parts, here, factor.to(device))
        found = torch.maximum(found, here.to(found.device))
    return found


def list_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients of all parameters of an optimizer that have one.

    Args:
        optimizer: the raw optimizer.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def is_of_one_mesh(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether torch's operations on lists of tensors take all of these parameters at once.

    Args:
        parameters: whole ones and DTensors.
    """
    return len({_mesh(parameter) for parameter in parameters}) < 2


def _measure(groups: list[list[torch.Tensor]], norm_type: float, comm: Comm | None) -> torch.Tensor:
    norms = []
    for group in groups:
        found = [item.grad for item in group if item.grad is not None]
        if is_sharded(found[0]) or not all(gradient.numel() for gradient in found):
            found = [_make_measurable(gradient, norm_type) for gradient in found]
        norms.append(to_full(get_total_norm(found, norm_type)))
    total = norms[0] if norms else torch.tensor(0.0, dtype=torch.float32)
    if len(norms) > 1:
        total = torch.linalg.vector_norm(torch.stack([norm.to(total.device) for norm in norms]), norm_type)
    return total if comm is None else comm.all_reduce(total.to(comm.device), "max")


def _make_measurable(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return a gradient with an element that does not count in place of a part without elements.

    A process has such a part of a weight with fewer rows than there are processes. It has no largest value.
    """
    with torch.no_grad():  # quicker than a detached DTensor
        part: torch.Tensor = gradient.to_local() if is_sharded(gradient) else gradient  # type: ignore[attr-defined]
    if part.numel():
        return gradient
    element = part.new_full((1,), 0.0 if norm_type >= 0 else math.inf)
    return from_local(element, gradient) if is_sharded(gradient) else element


def _mesh(tensor: torch.Tensor) -> object:
    return getattr(tensor, "device_mesh", None)  # DTensors have it; every step asks this of every parameter
