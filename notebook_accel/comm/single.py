"""The collectives of a run of one process, where each returns its input, and of a process that is no rank."""

from __future__ import annotations

from typing import Any, NoReturn

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


class AbsentComm(Comm):
    """What a process has that knows a run and is none of its ranks: every collective raises RuntimeError.

    Args:
        rank: for which this process works.
        world_size: number of ranks.
        device: where the rank trains.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._refuse()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        self._refuse()

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        self._refuse()

    def all_gather_object(self, obj: Any) -> list[Any]:
        self._refuse()

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        self._refuse()

    def barrier(self) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            f"this process, such as a worker of a data loader, is none of the {self.world_size} ranks of the run, and "
            "cannot wait for them or gather from them: do that in the ranks themselves"
        )
