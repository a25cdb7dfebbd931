"""Clipping gradients of which each process holds a part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..dtensors import whole


def clip_grad_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip the gradients to a total norm over all processes, and return the norm that they had.

    Parameters may be sharded over different meshes, and some not at all: torch cannot mix these.
    """
    chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    groups: dict[object, list[torch.Tensor]] = {}
    for parameter in chosen:
        if parameter.grad is not None:
            mesh = getattr(parameter, "device_mesh", None)  # of a sharded one
            groups.setdefault(mesh, []).append(parameter)
    if not groups:
        return torch.tensor(0.0)
    norms = [
        whole(get_total_norm([item.grad for item in group if item.grad is not None], norm_type))
        for group in groups.values()
    ]
    device = norms[0].device
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(device) for norm in norms]), norm_type
    )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
