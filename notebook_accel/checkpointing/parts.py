"""What a checkpoint is made of: the objects that an accelerator prepared, and what all ranks write together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .copies import Copies


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The objects that an accelerator prepared, each kind in the order of preparation.

    Attributes:
        models: as the strategy prepared them; hooks may have taken some out.
        owners: all models without wrappers: the optimizers' parameters are theirs.
        optimizers: without our wrapper.
        schedulers: without our wrapper.
        loaders: prepared loaders.
        scaler: the loss scaler of fp16, else None.
        custom: objects registered for checkpointing.
    """

    models: Sequence[torch.nn.Module]
    owners: Sequence[torch.nn.Module]
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    loaders: Sequence[Any]
    scaler: Any
    custom: Sequence[Any]


class CollectiveFolder(ABC):
    """A folder that all ranks write together; every rank calls the same methods in the same order."""

    @abstractmethod
    def write(self, where: Path) -> list[Path]:
        """Write this rank's part into the checkpoint's folder, durably, and return the files that this rank wrote.

        All ranks raise if one cannot.
        """

    @abstractmethod
    def snapshot(self, copies: Copies) -> CollectiveFolder:
        """Return the same with contents that training does not change, to be written by a thread of each rank.

        Args:
            copies: makes the copies of tensors.

        Raises:
            ValueError: this cannot be written while training goes on.
        """
