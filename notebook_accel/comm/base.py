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

    Tensors have to be on `device`. Users call the functions of `ops`, which are built on these methods.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
        device: where tensors of collectives are.
        debug: True makes `ops` compare the inputs of all ranks before each collective.
        scatters: whether there is `scatter`.
    """

    rank: int
    world_size: int
    device: torch.device
    debug: bool = False
    scatters: bool = False

    @cached_property
    def packing(self) -> Packing:
        """The layouts that `ops` keeps of trees of tensors that it gathers."""
        return Packing(self.world_size, self.device)

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's tensor on dim 0, in rank order.

        Args:
            tensor: [n, ...] with at least one dimension, of the same shape and dtype on every rank; it may be strided.

        Returns:
            A new tensor [world_size * n, ...].
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        """Reduce a tensor over all ranks, in place.

        Args:
            tensor: of the same shape and dtype on every rank.
            op: what to compute of the values of all ranks.

        Returns:
            The same tensor.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite a tensor with that of one rank, in place.

        Args:
            tensor: of the same shape and dtype on every rank.
            src: the rank whose values are taken.

        Returns:
            The same tensor.
        """

    def scatter(self, tensor: torch.Tensor, parts: list[torch.Tensor] | None, src: int = 0) -> torch.Tensor:
        """Overwrite a tensor on each rank with its part of what one rank has.

        Args:
            tensor: of the same shape and dtype on every rank.
            parts: of rank `src`: a tensor like `tensor` for each rank.
            src: the rank.

        Returns:
            The same tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} has no scatter: ask `scatters` first")

    @abstractmethod
    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return every rank's object, in rank order.

        Args:
            obj: anything that can be pickled.
        """

    @abstractmethod
    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Return the object of one rank.

        Args:
            obj: anything that can be pickled; only that of rank `src` counts.
            src: the rank.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:
        """Close what this object itself opened. A process group that the user made stays."""
        return None
