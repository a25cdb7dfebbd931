"""Clipping gradients of which each process holds a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from ..comm.base import Comm
from ..dtensors import to_full


def clip_grad_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float,
    comm: Comm | None = None,
) -> torch.Tensor:
    """Clip the gradients to a total norm over all processes, and return the norm before clipping.

    Parameters may be sharded over different meshes, and some not at all: torch cannot mix these.

    Args:
        parameters: those with gradients count.
        max_norm: the largest total norm.
        norm_type: 2 for the 2-norm; "inf" too.
        comm: given where processes have whole gradients of their own, so that their norms differ: the largest counts
            in all of them, since parts of one weight must not be scaled differently.
    """
    norm_type = float(norm_type)
    groups = _by_mesh(parameters)
    if not groups:
        none = torch.tensor(0.0)
        return none if comm is None else comm.all_reduce(none.to(comm.device), "max")
    norms = [
        to_full(get_total_norm([item.grad for item in group if item.grad is not None], norm_type))
        for group in groups
    ]
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    if comm is not None:
        total = comm.all_reduce(total.to(comm.device), "max")
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total)
    return total


def clip_grad_value(parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Clip every element of the gradients.

    Args:
        parameters: those whose gradients are clipped, whole or sharded.
        clip_value: the largest absolute value.
    """
    for group in _by_mesh(parameters):
        clip_grad_value_(group, clip_value)


def _by_mesh(parameters: Iterable[torch.Tensor] | torch.Tensor) -> list[list[torch.Tensor]]:
    """Return the parameters that have gradients, those of each mesh together."""
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter, "device_mesh", None)  # of a sharded one
            groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())
