"""Comm: the collectives that every process group offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, Literal

import torch

from .packing import Packing

ReduceOp = Literal["sum", "mean", "max", "min"]


class Comm(ABC):
    """Collectives over all ranks of a run; every rank calls each of them in the same order.

    Tensors lie on the device that the backend works on. `ops` builds what users call on these.
    """

    rank: int
    world_size: int
    device: torch.device
    """Where tensors of collectives lie."""
    debug: bool = False
    """True: `ops` compares the inputs of all ranks before each collective."""

    @cached_property
    def packing(self) -> Packing:
        """How `ops` lays out trees of tensors that it gathers."""
        return Packing(self.world_size, self.device)

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, in rank order, concatenated on dim 0; [n, ...] gives [world * n, ...].

        The tensor has at least one dimension, and the same shape and dtype on every rank; it may be strided.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce the tensor over all ranks in place and return it."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite the tensor with that of rank `src` in place and return it."""

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object in rank order; it must be picklable."""

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`; it must be picklable."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:
        """Give back what this object itself opened; a process group that the user made stays."""
        return None
