"""Weights that lie elsewhere while their module does not compute: mappings of names to tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch


class Weights(Mapping[str, torch.Tensor]):
    """A mapping that is asked for all weights of a module at once, by a thread while another module computes."""

    @abstractmethod
    def together(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these weights, with their values in memory, which may be pages of a file."""

    @abstractmethod
    def lasting(self, name: str) -> torch.Tensor:
        """Return a weight that is to stay, and keeps no file open."""


class PrefixedDataset(Weights):
    """The entries of a mapping below a prefix, by what follows it.

    Args:
        dataset: the mapping.
        prefix: put in front of each name that is asked for.
    """

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        size = len(self.prefix)
        return (name[size:] for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def together(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = together(self.dataset, [f"{self.prefix}{name}" for name in names])
        return {name: found[f"{self.prefix}{name}"] for name in names}

    def lasting(self, name: str) -> torch.Tensor:
        return lasting(self.dataset, f"{self.prefix}{name}")


def together(weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return these weights of any mapping; KeyError names one that is not there."""
    if isinstance(weights, Weights):
        return weights.together(names)
    return {name: weights[name] for name in names}


def lasting(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a weight of any mapping that is to stay, and keeps no file open; KeyError if it is not there."""
    return weights.lasting(name) if isinstance(weights, Weights) else weights[name]
