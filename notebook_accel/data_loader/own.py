"""What a prepared loader keeps of the user's own: attributes, methods, and the iteration of a subclass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from .samplers import name_sampler

_ITERATION: Final = ("__iter__", "_get_iterator")
_LIBRARIES: Final = ("torch", "torchdata", __name__.partition(".")[0])
_SHARED: Final = (
    "dataset",
    "batch_size",
    "drop_last",
    "sampler",
    "batch_sampler",
    "generator",
    "collate_fn",
    "_dataset_kind",
)
"""Attributes that the user's loader has from the prepared one before its own `__iter__` runs."""


class KeepsOwn(DataLoader[Any]):
    """A loader that reads by the iteration of the user's loader, and has its attributes and methods beside its own.

    Attributes:
        own: a copy of the user's loader; None where this loader was made without one.
        own_iteration: whether its class overrides `__iter__` or `_get_iterator`; this loader reads by that then.
        own_names: attributes of the user's loader that this one has not.
    """

    own: Any = None
    own_iteration: bool = False
    own_names: frozenset[str] | set[str] = frozenset()

    def adopt(self, loader: Any) -> None:
        """Keep what the user's loader has of its own.

        Args:
            loader: what this one was made of; it stays as it is.
        """
        if isinstance(loader, KeepsOwn):
            loader = loader.own
        if loader is not None:
            self.own, self.own_iteration = without_iterator(loader), has_own_iteration(loader)
            self.own_names = vars(self.own).keys() - vars(self).keys() - set(dir(type(self)))

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__.get("own")
        if own is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._hand_down()
        return getattr(own, name)

    def _hand_down(self) -> None:
        """Let the user's loader have what was assigned to its attributes here."""
        vars(self.own).update({name: vars(self)[name] for name in self.own_names & vars(self).keys()})

    def take_own_part(self, sampler: Any) -> Any:
        """Return the user's loader, which now reads this one's part.

        Args:
            sampler: in place of its batch sampler, or of its sampler where it has none.
        """
        self._hand_down()
        vars(self.own).update({name: vars(self)[name] for name in _SHARED}, **name_sampler(self, sampler))
        return self.own

    @property
    def persistent_iterator(self) -> Any:
        """The iterator of worker processes that go on with the next epoch, None without."""
        reader = self.own if self.own_iteration else self
        return reader._iterator if self.persistent_workers else None

    def read_own(self, epoch: Any, sampler: Any) -> Iterator[Any]:
        """Iterate as the user's loader does.

        Args:
            epoch: notes whether the sampler was read, and how many batches were drawn of it.
            sampler: see `take_own_part`.

        Raises:
            RuntimeError: its batches do not come from the sampler, so that they are no share.
        """
        loader, number = self.take_own_part(sampler), 0
        keeps_order = isinstance(self.dataset, IterableDataset) or hasattr(sampler, "load_state_dict")
        notes = isinstance(sampler, BatchSampler) and not keeps_order
        for number, batch in enumerate(loader, 1):  # noqa: B007
            if notes and epoch.order is None:
                raise RuntimeError(
                    f"{type(loader).__name__} gave a batch without reading its batch_sampler, so that every process "
                    "would get all samples: let its __iter__ read super().__iter__() anew in each epoch, or give "
                    "prepare a plain DataLoader and change its batches in the loop"
                )
            yield batch
        if epoch.total not in (None, number):
            self.remainder = -1  # not one batch for each of the sampler's: what repeats fill is not known


def has_own_iteration(loader: Any) -> bool:
    """Return True for a loader of the user's class that iterates in a way of its own."""
    kinds = type(loader).__mro__
    defining = (next((kind for kind in kinds if name in vars(kind)), DataLoader) for name in _ITERATION)
    return any(_library(kind) not in _LIBRARIES for kind in defining)


def is_of_user(loader: Any) -> bool:
    """Return True for a loader of a class of the user's."""
    return _library(type(loader)) not in _LIBRARIES


def _library(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def without_iterator(loader: Any) -> Any:
    """Return a copy of a loader that begins anew: worker processes belong to the loader that started them."""
    made = copy.copy(loader)
    made.__dict__["_iterator"] = None
    return made
