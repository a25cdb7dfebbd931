"""Converts between torch's DTensors, of which each process holds a part, and ordinary tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def is_sharded(tensor: Any) -> bool:
    """Return True for a DTensor.

    Args:
        tensor: any object.
    """
    # without the module there is no DTensor, and its import takes time
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def to_full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor.

    Args:
        tensor: for a DTensor it is a collective: all processes of the mesh call it. Others are returned unchanged.
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of the tensor that this process holds.

    Args:
        tensor: a DTensor, whose memory the result shares. Others are returned unchanged.
    """
    if not is_sharded(tensor):
        return tensor
    local: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def shard_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor sharded as another is; nothing is sent.

    Args:
        value: whole and equal in every process. A DTensor is returned unchanged.
        like: of the same shape. Where it is no DTensor, the value is returned unchanged.
    """
    if not is_sharded(like) or is_sharded(value):
        return value
    from torch.distributed.tensor import Replicate

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    replicas = _join(value.to(to_local(like).device), mesh, [Replicate()] * mesh.ndim, value)
    placed: torch.Tensor = replicas.redistribute(placements=like.placements)  # type: ignore[attr-defined]
    return placed


def from_local(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of the parts that the processes hold.

    Args:
        part: what this process holds, of the shape of `to_local(like)`, on any device.
        like: a DTensor that is sharded in the same way.
    """
    return _join(part, like.device_mesh, like.placements, like)  # type: ignore[attr-defined]


def _join(part: torch.Tensor, mesh: Any, placements: Sequence[Any], whole: torch.Tensor) -> torch.Tensor:
    """Return a DTensor of the shape of `whole`.

    `DTensor.from_local` would move the part to the mesh's kind of device: weights that are offloaded to the CPU would
    come back to the GPU.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(whole.shape, whole.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)
