"""Tensors of which each process holds a part, torch's DTensors: told apart, made whole, and made of whole ones."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor."""
    # where nobody imported them there is none
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor; of a sharded one, all processes of its mesh call this together."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of the tensor, in the same memory."""
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def sharded_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every process has whole, sharded as `like` is; nothing is sent."""
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    replicas = DTensor.from_local(
        value.to(own_part(like).device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    placed: torch.Tensor = replicas.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return placed


def with_part(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded as `like` is, of which this process holds `part`."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        part,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made
