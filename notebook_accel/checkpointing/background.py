"""Writes a checkpoint in a thread while training goes on: copies, the thread, and barriers without collectives."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ..errors import CheckpointError
from ..notices import tell
from .copies import Copies
from .write import ErrorBarrier, File

_PAUSE_S: Final = 0.02


def snapshot(files: Sequence[File], copies: Copies) -> list[File]:
    """Return the files with copies of their contents, which training does not change.

    Args:
        files: of this rank.
        copies: makes the copies of tensors.
    """
    return [
        dataclasses.replace(
            file, content=copy.deepcopy(file.content) if file.opaque else copies.of(file.content)
        )
        for file in files
    ]


class BackgroundWriter:
    """Writes one checkpoint at a time; its errors are raised by the next `wait`.

    Pickled it is None: the checkpoint that it writes is of this process alone.
    """

    def __init__(self) -> None:
        self.copies = Copies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def start(self, work: Callable[[], None], what: str) -> None:
        """Run `work` in a thread, which the interpreter waits for before it ends.

        Args:
            work: writes the checkpoint.
            what: the checkpoint's name, for the thread's.

        Raises:
            CheckpointError: the checkpoint before this one could not be written.
        """
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # raised by the next wait
                self._error = error

        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=run, name=f"checkpoint {what}", daemon=False)
        self._thread.start()

    def wait(self) -> None:
        """Return once the checkpoint is on the disk; CheckpointError if it could not be written."""
        self._join()
        error, self._error = self._error, None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            raise CheckpointError(f"a checkpoint saved in the background was not written: {error}") from error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.copies.reset()
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._join()
        if self._error is not None:
            tell(f"a checkpoint saved in the background was not written: {self._error}")


class FileErrorBarrier(ErrorBarrier):
    """For a thread, whose collectives would mix with those of the main thread: each barrier is a file of each rank.

    Args:
        folder: where the files go, seen by all ranks, for this checkpoint alone; rank 0 removes it.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: seconds to wait for the slowest rank; CheckpointError names who is missing.
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

    def close(self) -> None:
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
