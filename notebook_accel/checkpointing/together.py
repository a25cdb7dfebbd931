"""A part of a checkpoint that all ranks write together, such as the shards of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from .write import Copies


class Together(ABC):
    """A folder of a checkpoint; every rank calls the same methods in the same order."""

    @abstractmethod
    def write(self, where: Path) -> None:
        """Write this rank's part into the checkpoint's folder, durably; all ranks raise if one cannot."""

    @abstractmethod
    def snapshot(self, copies: Copies) -> Together:
        """Return the same with contents that training does not change, to be written by a thread of each rank.

        ValueError if this cannot be written while training goes on.
        """


def write_all(parts: Sequence[Together], where: Path) -> None:
    """Write the parts one after another, as all ranks do."""
    for part in parts:
        part.write(where)
