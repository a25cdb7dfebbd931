"""How the ranks learn what the others' part of a checkpoint came to."""

from __future__ import annotations

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from ..comm.base import Comm
from ..errors import CheckpointError

_PAUSE_S: Final = 0.02


class Agreement(ABC):
    """Meeting points of all ranks."""

    @abstractmethod
    def exchange(self, stage: str, error: str | None) -> list[str | None]:
        """Return every rank's error, or None, in rank order, once all ranks have come to this stage."""

    def require(self, stage: str, error: str | None, what: str) -> None:
        """Raise CheckpointError on all ranks if one of them has an error."""
        errors = self.exchange(stage, error)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(errors) if text is not None]
        if found:
            raise CheckpointError(f"{what}: {'; '.join(found)}")

    def leave(self) -> None:
        """Give back what the meetings needed; this rank comes to no other."""
        return None


class ByCollectives(Agreement):
    """For the main thread: a collective at each stage."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def exchange(self, stage: str, error: str | None) -> list[str | None]:
        return self._comm.all_gather_object(error)


class ByFiles(Agreement):
    """For a thread, in which collectives would mix with those of the main thread: a small file at each stage.

    Args:
        folder: where the files go, seen by all ranks and of this meeting alone; rank 0 removes it.
        rank: of this process.
        world_size: how many ranks meet.
        timeout_s: how long to wait for the slowest; CheckpointError names who is missing.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout_s: float = 1800.0) -> None:
        self._folder = folder
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._gave_up = False

    def exchange(self, stage: str, error: str | None) -> list[str | None]:
        if self._world_size == 1:
            return [error]
        self._post(stage, error)
        return [self._wait(stage, rank) for rank in range(self._world_size)]

    def leave(self) -> None:
        if self._world_size == 1 or self._gave_up:
            return
        if self._rank != 0:
            self._post("left", None)
            return
        for rank in range(1, self._world_size):
            self._wait("left", rank)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _post(self, stage: str, error: str | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{stage}-{self._rank}"
        path.with_suffix(".part").write_text(json.dumps(error), encoding="utf-8")
        os.replace(path.with_suffix(".part"), path)

    def _wait(self, stage: str, rank: int) -> str | None:
        path = self._folder / f"{stage}-{rank}"
        deadline = time.monotonic() + self._timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                self._gave_up = True
                raise CheckpointError(f"rank {rank} did not finish its part within {self._timeout_s:g} s")
            time.sleep(_PAUSE_S)
        answer: str | None = json.loads(path.read_text(encoding="utf-8"))
        return answer
