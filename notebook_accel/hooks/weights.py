"""Mappings of names to weights that are stored elsewhere while their module does not compute."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch


class Weights(Mapping[str, torch.Tensor]):
    """A mapping that returns all weights of a module at once; a thread asks it while another module computes."""

    @abstractmethod
    def get_many(
        self, names: Sequence[str], *, aligned: bool = True, beside: bool = False
    ) -> dict[str, torch.Tensor]:
        """Return these weights by name; their memory may be pages of a file.

        Args:
            names: theirs.
            aligned: False where no kernel of the CPU computes with them: any pages of a file will do then.
            beside: whether a module computes meanwhile, with the threads of torch.
        """

    @abstractmethod
    def is_near(self, names: Sequence[str]) -> bool:
        """Return whether the system has these weights in memory: a disk is not asked for them."""

    @abstractmethod
    def check(self, names: Sequence[str]) -> None:
        """Raise CheckpointError if a file whose pages are these weights has changed: their values may be gone."""

    @abstractmethod
    def get_lasting(self, name: str) -> torch.Tensor:
        """Return a weight that is to stay in memory, and keeps no file open."""


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

    def get_many(
        self, names: Sequence[str], *, aligned: bool = True, beside: bool = False
    ) -> dict[str, torch.Tensor]:
        whole = [f"{self.prefix}{name}" for name in names]
        found = get_many(self.dataset, whole, aligned=aligned, beside=beside)
        return {name: found[f"{self.prefix}{name}"] for name in names}

    def is_near(self, names: Sequence[str]) -> bool:
        return is_near(self.dataset, [f"{self.prefix}{name}" for name in names])

    def check(self, names: Sequence[str]) -> None:
        check(self.dataset, [f"{self.prefix}{name}" for name in names])

    def get_lasting(self, name: str) -> torch.Tensor:
        return get_lasting(self.dataset, f"{self.prefix}{name}")


def get_many(
    weights: Mapping[str, torch.Tensor], names: Sequence[str], *, aligned: bool = True, beside: bool = False
) -> dict[str, torch.Tensor]:
    """Return some weights of any mapping.

    Args:
        weights: the mapping.
        names: of the weights.
        aligned: see `Weights.get_many`.
        beside: likewise.

    Raises:
        KeyError: a name is not there.
    """
    if isinstance(weights, Weights):
        return weights.get_many(names, aligned=aligned, beside=beside)
    return {name: weights[name] for name in names}


def is_near(weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> bool:
    """Return whether weights of any mapping are in memory as far as is known, see `Weights.is_near`.

    Args:
        weights: the mapping.
        names: of the weights.
    """
    return isinstance(weights, Weights) and weights.is_near(names)


def check(weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Raise CheckpointError if files of any mapping have changed since they were looked up.

    Args:
        weights: the mapping.
        names: of the weights.
    """
    if isinstance(weights, Weights):
        weights.check(names)


def get_lasting(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a weight of any mapping; one of a file gets memory of its own, so that no file stays open.

    Args:
        weights: the mapping.
        name: of the weight.

    Raises:
        KeyError: the name is not there.
    """
    return weights.get_lasting(name) if isinstance(weights, Weights) else weights[name]
