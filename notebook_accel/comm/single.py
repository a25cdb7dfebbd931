"""The collectives of a run of one process: each returns its input."""

from __future__ import annotations

from typing import Any

import torch

from .base import Comm, ReduceOp


class SingleComm(Comm):
    """A world of one."""

    rank = 0
    world_size = 1

    def __init__(self, device: torch.device | None = None, *, debug: bool = False) -> None:
        self.device = device or torch.device("cpu")
        self.debug = debug

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return tensor

    def all_gather_object(self, obj: Any) -> list[Any]:
        return [obj]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj

    def barrier(self) -> None:
        return None
